from __future__ import annotations

import json
import tomllib
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from infra.settings import environment as read_environment
from islands.config import (
    IDENTITY_KEYS,
    InnerConfig,
    IslandConfig,
    RunConfig,
    SyncConfig,
    changed_identity,
    config_from_json,
    identity,
    parse_config,
    to_toml,
)
from islands.types import ConfigError

Door = Callable[[dict[str, str]], RunConfig]


def through_file(values: dict[str, str]) -> RunConfig:
    text = "\n".join(f"{key} = {literal}" for key, literal in values.items())
    return parse_config(text, source="run.toml")


def through_assignments(values: dict[str, str]) -> RunConfig:
    return parse_config("", assignments=[f"{k}={v}" for k, v in values.items()], source="run.toml")


def through_environment(values: dict[str, str]) -> RunConfig:
    variables = {f"DILOCO_{k.replace('.', '__').upper()}": v for k, v in values.items()}
    return parse_config("", environment=variables, source="run.toml")


def through_json(values: dict[str, str]) -> RunConfig:
    tree = tomllib.loads("\n".join(f"{key} = {literal}" for key, literal in values.items()))
    return config_from_json(json.dumps(tree), source="run.json")


every_door = pytest.mark.parametrize(
    "door", [through_file, through_assignments, through_environment, through_json]
)


def message_of(door: Door, values: dict[str, str]) -> str:
    with pytest.raises(ConfigError) as caught:
        door(values)
    return str(caught.value)


# --- values ----------------------------------------------------------------------------------


def test_the_defaults_are_a_valid_configuration() -> None:
    config = parse_config("", source="run.toml")
    assert config == RunConfig()
    assert [island.name for island in config.islands] == ["west", "east", "europe", "asia"]
    assert config.total_tokens == 4_000_000
    assert config.quorum == 2


@every_door
def test_every_door_sets_the_same_values(door: Door) -> None:
    config = door(
        {
            "sync.period_steps": "48",
            "outer.merge": '"mean"',
            "durable": "false",
            "islands": '[{name = "a", speed = 0.7}, {name = "b"}]',
        }
    )
    assert config == RunConfig(
        sync=SyncConfig(period_steps=48),
        outer=config.outer.model_copy(update={"merge": "mean"}),
        durable=False,
        islands=(IslandConfig(name="a", speed=0.7), IslandConfig(name="b")),
    )


@every_door
def test_a_whole_number_is_accepted_where_a_float_is_expected(door: Door) -> None:
    assert door({"outer.learning_rate": "1"}).outer.learning_rate == 1.0


def test_the_environment_beats_the_file_and_assignments_beat_both() -> None:
    config = parse_config(
        "seed = 1\ntotal_tokens = 1\nsync.period_steps = 10",
        environment={"DILOCO_TOTAL_TOKENS": "2", "DILOCO_SYNC__PERIOD_STEPS": "20"},
        assignments=["sync.period_steps=30"],
        source="run.toml",
    )
    assert (config.seed, config.total_tokens, config.sync.period_steps) == (1, 2, 30)


def test_the_last_of_two_assignments_counts() -> None:
    assert parse_config("", assignments=["seed=1", "seed=2"], source="x").seed == 2


def test_an_island_is_addressed_by_name_or_by_index() -> None:
    config = parse_config(
        "", assignments=["islands.west.speed=0.7", "islands.3.batch_size=2"], source="x"
    )
    assert [island.speed for island in config.islands] == [0.7, 1.0, 1.0, 1.0]
    assert [island.batch_size for island in config.islands] == [8, 8, 8, 2]
    variables = {"DILOCO_ISLANDS__WEST__SPEED": "0.5"}
    assert parse_config("", environment=variables, source="x").islands[0].speed == 0.5


def test_a_name_wins_over_an_index() -> None:
    config = parse_config(
        'islands = [{name = "a"}, {name = "0"}]', assignments=["islands.0.speed=2"], source="x"
    )
    assert [island.speed for island in config.islands] == [1.0, 2.0]


def test_a_whole_section_in_the_environment_is_laid_down_before_its_members() -> None:
    variables = {"DILOCO_SYNC__ALPHA": "0.5", "DILOCO_SYNC": "{period_steps = 48}"}
    sync = parse_config("", environment=variables, source="x").sync
    assert (sync.period_steps, sync.alpha) == (48, 0.5)


def test_a_variable_is_read_whatever_its_case() -> None:
    assert parse_config("", environment={"diloco_Seed": "7"}, source="x").seed == 7


def test_a_variable_without_the_prefix_is_ignored() -> None:
    assert parse_config("", environment={"PATH": "/bin", "SEED": "7"}, source="x").seed == 0


@pytest.mark.parametrize(
    ("assignment", "value"),
    [
        ("sync.codec=bfloat16", "bfloat16"),
        ('sync.codec="bfloat16"', "bfloat16"),
        ("sync.codec = bfloat16 ", "bfloat16"),
    ],
)
def test_a_bare_word_is_text_where_text_is_expected(assignment: str, value: str) -> None:
    assert parse_config("", assignments=[assignment], source="x").sync.codec == value


def test_a_url_needs_no_quotes() -> None:
    config = parse_config("", assignments=["store=s3://bucket/a=b?c=d"], source="x")
    assert config.store == "s3://bucket/a=b?c=d"


@pytest.mark.parametrize(
    ("num_islands", "sync", "quorum"),
    [
        (1, "", 1),
        (3, "", 2),
        (4, "", 2),
        (5, "", 3),
        (4, "sync.min_learners = 1", 1),
        (4, "sync.min_learners = 4", 4),
        (3, 'sync.algorithm = "streaming"', 3),
        (3, 'sync.algorithm = "diloco"\nsync.num_fragments = 1', 3),
    ],
)
def test_the_quorum_is_min_learners_or_half_rounded_up_or_all_where_they_wait(
    num_islands: int, sync: str, quorum: int
) -> None:
    islands = ", ".join(f'{{name = "i{index}"}}' for index in range(num_islands))
    assert parse_config(f"islands = [{islands}]\n{sync}", source="x").quorum == quorum


def test_the_tree_is_frozen() -> None:
    with pytest.raises(ValidationError):
        RunConfig().sync.period_steps = 3


# --- rules of one field: rule, value and remedy in the message ---------------------------------

FIELD_RULES = [
    ("total_tokens", "0", "must be greater than 0", "0", "default 4000000"),
    ("total_tokens", "9223372036854775808", "less than or equal to", "9223372036854775808", ""),
    ("seed", "-1", "must be greater than or equal to 0", "-1", "default 0"),
    ("retention", '"some"', "must be 'bounded' or 'all'", '"some"', "choose one of these"),
    ("store", '""', "must have at least 1 character", '""', "default"),
    ("durable", "1", "must be a valid boolean", "1", "write true or false"),
    ("model.width", "0", "must be greater than or equal to 1", "0", "default 64"),
    ("model.width", '"4"', "must be a valid integer", '"4"', "without quotes"),
    ("model.width", "4.0", "must be a valid integer", "4.0", "whole number"),
    ("model.width", "true", "must be a valid integer", "true", "whole number"),
    ("model.width", "nan", "must be a valid integer", "NaN", "whole number"),
    ("model", "3", "must be an object", "3", "write a table"),
    ("data.source", "3", "must be a valid string", "3", "in quotes"),
    ("data.held_out_fraction", "0", "must be greater than 0", "0", "default 0.05"),
    ("data.held_out_fraction", "0.5", "must be less than 0.5", "0.5", "default 0.05"),
    ("inner.learning_rate", "0", "must be greater than 0", "0", "default 0.004"),
    ("inner.learning_rate", "1.5", "must be less than or equal to 1", "1.5", "default 0.004"),
    ("inner.learning_rate", "nan", "must be a finite number", "NaN", "write a finite number"),
    ("inner.learning_rate", "true", "must be a valid number", "true", "write a number"),
    ("inner.warmup_fraction", "1", "must be less than 1", "1", "default 0.05"),
    ("inner.final_fraction", "1.1", "must be less than or equal to 1", "1.1", "default 0.01"),
    ("inner.beta1", "1", "must be less than 1", "1", "default 0.9"),
    ("inner.beta2", "-0.1", "must be greater than or equal to 0", "-0.1", "default 0.99"),
    ("inner.weight_decay", "-1", "must be greater than or equal to 0", "-1", "default 0.1"),
    ("inner.clip_norm", "0", "must be greater than 0", "0", "default 1.0"),
    ("inner.clip_norm", "inf", "must be a finite number", "Infinity", "write a finite number"),
    ("outer.learning_rate", "-inf", "must be a finite number", "-Infinity", "finite number"),
    ("outer.momentum", "1", "must be less than 1", "1", "default 0.7"),
    ("outer.merge", '"sum"', "must be 'rda' or 'mean'", '"sum"', "choose one of these"),
    ("outer.weighting", '"one"', "must be 'quality' or 'tokens'", '"one"', "choose one of these"),
    ("sync.algorithm", '"async"', "must be 'decoupled', 'streaming'", '"async"', "choose"),
    ("sync.num_fragments", "0", "must be greater than or equal to 1", "0", "default 4"),
    ("sync.period_steps", "0", "must be greater than or equal to 1", "0", "default 24"),
    ("sync.min_learners", "0", "must be greater than or equal to 1", "0", "another value"),
    ("sync.grace_fraction", "1.01", "must be less than or equal to 1", "1.01", "default 0.25"),
    ("sync.alpha", "-0.5", "must be greater than or equal to 0", "-0.5", "default 0.0"),
    ("sync.overlap_steps", "-1", "must be greater than or equal to 0", "-1", "default 0"),
    ("sync.max_staleness", "-1", "must be greater than or equal to 0", "-1", "default 4"),
    ("sync.outlier_factor", "1", "must be greater than 1", "1", "default 10.0"),
    ("sync.codec", '"int2"', "must be 'float32', 'bfloat16'", '"int2"', "choose one of these"),
    ("sync.codec", '"int4-delta"', "'int4' or 'e3m0'", '"int4-delta"', "choose one of these"),
    ("sync.codec_down", '"int2"', "'int4-delta' or 'e3m0-delta'", '"int2"', "choose one of these"),
    ("sync.chunk_bytes", "4095", "must be greater than or equal to 4096", "4095", "16777216"),
    ("local.checkpoint_steps", "0", "must be greater than or equal to 1", "0", "default 96"),
    ("local.faults", '[{island = "west", step = 0}]', "greater than or equal to 1", "0", "choose"),
    ("local.faults", '[{island = "west"}]', "step is required", "nothing", "add it"),
    ("local.faults", "[3]", "must be an object", "3", "write a table"),
    ("pipeline.segment_seconds", "0", "must be greater than 0", "0", "default 60.0"),
    ("pipeline.segment_seconds", "86401", "or equal to 86400", "86401", "default 60.0"),
    ("pipeline.checkpoint_seconds", "0", "must be greater than 0", "0", "default 20.0"),
    ("pipeline.checkpoint_seconds", "86401", "or equal to 86400", "86401", "default 20.0"),
    ("pipeline.max_restarts", "-1", "must be greater than or equal to 0", "-1", "default 5"),
    ("pipeline.max_restarts", "10001", "less than or equal to 10000", "10001", "default 5"),
    ("pipeline.max_restarts", "1.5", "must be a valid integer", "1.5", "whole number"),
    ("pipeline.linger_periods", "-1", "must be greater than or equal to 0", "-1", "default 10.0"),
    ("pipeline.linger_periods", "nan", "must be a finite number", "NaN", "finite number"),
    ("islands", "[]", "must have at least 1 item", "[]", "choose another value"),
    ("islands", "3", "must be a valid array", "3", "write a list"),
    ("islands", "[{}]", "islands.0.name is required", "nothing", "add it"),
    ("islands", '[{name = "West"}]', "must match pattern", '"West"', "1 to 64 of a-z 0-9 - _"),
    ("islands", '[{name = "a\\n"}]', "must match pattern", '"a\\n"', "alphanumeric at both ends"),
    ("islands", '[{name = "a", device = "gpu"}]', "must match pattern", '"gpu"', "cuda:<index>"),
    ("islands", '[{name = "a", speed = 0}]', "must be greater than 0", "0", "default 1.0"),
    ("islands", '[{name = "a", speed = 101}]', "less than or equal to 100", "101", "default 1.0"),
    ("islands", '[{name = "a", push_delay_steps = -1}]', "or equal to 0", "-1", "default 0.0"),
    (
        "islands",
        '[{name = "a", start_steps = 1e308}]',
        "or equal to 1000000",
        "1e+308",
        "default 0.0",
    ),
    (
        "islands",
        '[{name = "a", push_delay_steps = 1e308}]',
        "or equal to 1000000",
        "1e+308",
        "default 0.0",
    ),
    (
        "islands",
        '[{name = "a", fetch_delay_steps = 1e308}]',
        "or equal to 1000000",
        "1e+308",
        "default 0.0",
    ),
    (
        "islands",
        '[{name = "a", bandwidth_mbit = 0}]',
        "must be greater than 0",
        "0",
        "choose another value",
    ),
    ("islands", '[{name = "a", batch_size = 0}]', "or equal to 1", "0", "default 8"),
    ("islands", '[{name = "a", checkpoints = ""}]', "at least 1 character", '""', "choose"),
    (
        "islands",
        '[{name = "a", cluster = {kind = "k8s"}}]',
        "'local' or 'address'",
        '"k8s"',
        "choose",
    ),
    ("islands", '[{name = "a", cluster = {threads = 0}}]', "or equal to 1", "0", "default 1"),
    (
        "islands",
        '[{name = "a", cluster = {threads = 1025}}]',
        "or equal to 1024",
        "1025",
        "default 1",
    ),
    ("islands", '[{name = "a", cluster = {spares = -1}}]', "or equal to 0", "-1", "default 0"),
    ("islands", '[{name = "a", cluster = {spares = 65}}]', "or equal to 64", "65", "default 0"),
    ("islands", '[{name = "a", cluster = {memory_mb = 63}}]', "or equal to 64", "63", "choose"),
    (
        "islands",
        '[{name = "a", cluster = {memory_mb = 16777217}}]',
        "or equal to 16777216",
        "16777217",
        "choose",
    ),
    ("islands", '[{name = "a", cluster = {ca_file = ""}}]', "at least 1 character", '""', "choose"),
    (
        "islands",
        '[{name = "a", cluster = {address = "ftp://h:1"}}]',
        "match",
        '"ftp://h:1"',
        "tcp://",
    ),
    ("islands", '[{name = "a", cluster = {address = "tcp://h"}}]', "match", '"tcp://h"', "tcp://"),
    (
        "islands",
        '[{name = "a", cluster = {address = "tcp://u@h:1"}}]',
        "match",
        '"tcp://u@h:1"',
        "tcp://",
    ),
]


@every_door
@pytest.mark.parametrize(("key", "literal", "rule", "value", "remedy"), FIELD_RULES)
def test_a_broken_bound_is_told_with_rule_value_and_remedy(
    door: Door, key: str, literal: str, rule: str, value: str, remedy: str
) -> None:
    message = message_of(door, {key: literal})
    assert "\n" not in message
    told, _, told_remedy = message.partition("; ")
    assert f": {key}" in told
    assert rule in told
    assert told.endswith(f"got {value}")
    assert remedy in told_remedy


# --- rules between fields ----------------------------------------------------------------------

STREAMING = {"sync.algorithm": '"streaming"'}
DILOCO = {"sync.algorithm": '"diloco"', "sync.num_fragments": "1"}
DATA_PARALLEL = {
    "sync.algorithm": '"data-parallel"',
    "sync.num_fragments": "1",
    "sync.period_steps": "1",
    "sync.codec_down": '"float32"',
    "outer.merge": '"mean"',
    "outer.weighting": '"tokens"',
}


def on_cluster(settings: str) -> dict[str, str]:
    """Return one island with these settings of its cluster."""
    return {"islands": f'[{{name = "a", cluster = {{{settings}}}}}]'}


CROSS_FIELD_RULES = [
    (
        {"sync.min_learners": "5"},
        "sync.min_learners must be <= the number of islands (4), got 5; lower it or add islands",
    ),
    (
        {"model.width": "30", "model.num_heads": "4"},
        "model.width must be a multiple of model.num_heads (4), got 30; try 32",
    ),
    (
        {"data.eval_bytes": "64"},
        "data.eval_bytes must be > model.context (64), got 64; raise it, or no sequence can be scored",
    ),
    (
        {"islands": '[{name = "a"}, {name = "b"}, {name = "a"}]'},
        "islands must have unique names, got a more than once; rename one of them",
    ),
    (
        {"local.faults": '[{island = "wst", step = 3}]'},
        "local.faults.0.island must name an island (west, east, europe, asia), "
        'got "wst"; correct the name or remove the fault',
    ),
    (
        {"sync.period_steps": "3"},
        "sync.period_steps must be >= sync.num_fragments (4), got 3; "
        "lengthen the period or use fewer fragments",
    ),
    (
        {"sync.overlap_steps": "1"},
        "sync.overlap_steps must be 0 unless sync.algorithm is streaming (decoupled), got 1; "
        "remove it or choose streaming",
    ),
    (
        {**STREAMING, "sync.period_steps": "25"},
        "sync.period_steps must be a multiple of sync.num_fragments (4) under streaming, got 25; try 28",
    ),
    (
        {**STREAMING, "sync.overlap_steps": "6"},
        "sync.overlap_steps must be < sync.period_steps / sync.num_fragments (6), got 6; lower it",
    ),
    (
        {**STREAMING, "sync.min_learners": "3"},
        "sync.min_learners must be the number of islands (4) under streaming, got 3; "
        "remove it or choose decoupled",
    ),
    (
        {**DILOCO, "sync.num_fragments": "4"},
        "sync.num_fragments must be 1 under diloco, got 4; add --set sync.num_fragments=1",
    ),
    (
        {**DILOCO, "sync.alpha": "0.5"},
        "sync.alpha must be 0.0 under diloco, got 0.5; add --set sync.alpha=0.0",
    ),
    (
        {**DILOCO, "sync.overlap_steps": "1"},
        "sync.overlap_steps must be 0 unless sync.algorithm is streaming (diloco), got 1; "
        "remove it or choose streaming",
    ),
    (
        {**DILOCO, "sync.min_learners": "2"},
        "sync.min_learners must be the number of islands (4) under diloco, got 2; "
        "remove it or choose decoupled",
    ),
    (
        {**DATA_PARALLEL, "sync.period_steps": "2"},
        "sync.period_steps must be 1 under data-parallel, got 2; add --set sync.period_steps=1",
    ),
    (
        {**DATA_PARALLEL, "sync.codec": '"bfloat16"'},
        'sync.codec must be float32 under data-parallel, got "bfloat16"; '
        "add --set sync.codec=float32",
    ),
    (
        {**DATA_PARALLEL, "sync.codec_down": '"bfloat16"'},
        'sync.codec_down must be float32 under data-parallel, got "bfloat16"; '
        "add --set sync.codec_down=float32",
    ),
    (
        {**DATA_PARALLEL, "outer.merge": '"rda"'},
        'outer.merge must be mean under data-parallel, got "rda"; add --set outer.merge=mean',
    ),
    (
        {**DATA_PARALLEL, "outer.weighting": '"quality"'},
        'outer.weighting must be tokens under data-parallel, got "quality"; '
        "add --set outer.weighting=tokens",
    ),
    (
        on_cluster('kind = "address"'),
        'islands.a.cluster.address is required with kind "address", got nothing; name the scheduler',
    ),
    (
        on_cluster('address = "tcp://h:1"'),
        'islands.a.cluster.address must be absent with kind "local", got "tcp://h:1"; '
        'remove it or set kind = "address"',
    ),
    (
        on_cluster('kind = "address", address = "tcp://h:1", spares = 2'),
        'islands.a.cluster.spares must be absent with kind "address", got 2; '
        "whoever runs that scheduler starts its workers, so set it there",
    ),
    (
        on_cluster('kind = "address", address = "tcp://h:1", memory_mb = 64'),
        'islands.a.cluster.memory_mb must be absent with kind "address", got 64; '
        "whoever runs that scheduler starts its workers, so set it there",
    ),
    (
        on_cluster('kind = "address", address = "tcp://h:1", key_file = "k"'),
        "islands.a.cluster.address must begin with tls:// where certificates are named, "
        'got "tcp://h:1"; correct the address or remove the files',
    ),
    (
        on_cluster('ca_file = "ca"'),
        "islands.a.cluster.address must begin with tls:// where certificates are named, "
        "got nothing; correct the address or remove the files",
    ),
    (
        on_cluster('kind = "address", address = "tls://h:1", ca_file = "ca"'),
        "islands.a.cluster.ca_file and cert_file are required with a tls:// scheduler, "
        'got "ca" and nothing; name both',
    ),
]


@every_door
@pytest.mark.parametrize(("values", "line"), CROSS_FIELD_RULES)
def test_a_broken_rule_between_fields_is_told_with_rule_value_and_remedy(
    door: Door, values: dict[str, str], line: str
) -> None:
    message = message_of(door, values)
    assert "\n" not in message
    assert message.endswith(f": {line}")


@every_door
def test_streaming_at_its_limits_is_accepted(door: Door) -> None:
    config = door({**STREAMING, "sync.overlap_steps": "5", "sync.min_learners": "4"})
    assert config.sync.overlap_steps == 5


@every_door
def test_every_algorithm_is_accepted_with_what_its_messages_ask_for(door: Door) -> None:
    assert door(DILOCO).sync.blocks
    config = door(DATA_PARALLEL)
    assert (config.sync.blocks, config.sync.sends_gradients) == (True, True)


def test_where_learners_wait_for_each_other_all_train_as_many_steps() -> None:
    """So a slow island's share is by its batch alone."""
    islands = (
        'islands = [{name = "a", batch_size = 3}, {name = "b", batch_size = 4, speed = 0.5}]\n'
    )
    assert parse_config(islands, source="x").rates == {"a": 3.0, "b": 2.0}
    streaming = parse_config(islands + 'sync.algorithm = "streaming"', source="x")
    assert streaming.rates == {"a": 3.0, "b": 4.0}


@every_door
def test_a_cluster_of_any_allowed_kind_is_accepted(door: Door) -> None:
    kinds = (
        'kind = "local", threads = 4',
        'kind = "address", address = "tcp://10.0.0.7:8786"',
        'kind = "address", address = "tls://dask.example:8786", ca_file = "ca", cert_file = "c"',
    )
    clusters = [door(on_cluster(kind)).islands[0].cluster for kind in kinds]
    assert [cluster.kind for cluster in clusters] == ["local", "address", "address"]
    assert clusters[0].threads == 4
    assert clusters[2].address == "tls://dask.example:8786"
    assert clusters[2].key_file is None


@every_door
def test_the_pipeline_at_its_limits_is_accepted(door: Door) -> None:
    values = {"pipeline.max_restarts": "0", "pipeline.linger_periods": "0"}
    pipeline = door({**values, "pipeline.segment_seconds": "86400"}).pipeline
    assert (pipeline.max_restarts, pipeline.linger_periods) == (0, 0)
    assert pipeline.segment_seconds == 86_400


@every_door
def test_all_broken_rules_are_told_at_once_one_a_line(door: Door) -> None:
    fields = message_of(door, {"seed": "-1", "sync.alpha": "2"})
    assert len(fields.splitlines()) == 2
    rules = message_of(door, {"sync.min_learners": "9", "model.width": "30"})
    assert len(rules.splitlines()) == 2


# --- names that do not exist -------------------------------------------------------------------


@every_door
@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("sync.perod_steps", "sync.period_steps"),
        ("period_steps", "sync.period_steps"),
        ("synk", "sync"),
        ("outer.learning_rat", "outer.learning_rate"),
        ("sync_period_steps", "sync.period_steps"),
    ],
)
def test_an_unknown_key_is_refused_with_the_likeliest_one(door: Door, key: str, meant: str) -> None:
    message = message_of(door, {key: "3"})
    assert f"{key} is unknown" in message
    if door is through_environment:
        meant = "DILOCO_" + meant.replace(".", "__").upper()
    assert message.endswith(f"did you mean {meant}?")


def test_an_unknown_key_that_fits_two_places_names_both() -> None:
    message = message_of(through_file, {"learning_rate": "1"})
    assert message.endswith("did you mean inner.learning_rate or outer.learning_rate?")


def test_an_unknown_key_like_no_other_lists_the_keys_of_its_section() -> None:
    message = message_of(through_file, {"outer.zzz": "1"})
    assert message.endswith(
        "choose one of outer.learning_rate, outer.momentum, outer.merge, outer.weighting"
    )


def test_an_unknown_key_in_a_list_is_told_with_its_index() -> None:
    message = message_of(through_file, {"islands": '[{name = "a"}, {name = "b", sped = 1}]'})
    assert "islands.1.sped is unknown, got 1; did you mean islands.1.speed?" in message


def test_a_path_below_a_single_value_is_refused() -> None:
    message = message_of(through_assignments, {"seed.x": "1"})
    assert message.endswith('seed.x is unknown, got "1"; seed is a single value; remove the rest')


@pytest.mark.parametrize("key", ["islands.wset.speed", "islands.4.speed", "islands.-1.speed"])
def test_an_island_that_does_not_exist_is_refused(key: str) -> None:
    message = message_of(through_assignments, {key: "1"})
    assert "islands must be followed by a name (west, east, europe, asia) or an index" in message
    assert ("did you mean west?" in message) == ("wset" in key)


# --- texts that are no values ------------------------------------------------------------------


@pytest.mark.parametrize("door", [through_assignments, through_environment])
@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("seed", "abc"),
        ("seed", ""),
        ("seed", "1\nstore = 2"),
        ("durable", "yes"),
        ("sync.codec", '"bfloat16'),
        ("store", ""),
        ("store", "a\nb"),
        ("seed", "9" * 5000),
    ],
)
def test_a_text_that_is_no_toml_literal_is_refused(door: Door, key: str, text: str) -> None:
    message = message_of(door, {key: text})
    assert f"{key} must be a TOML literal, got " in message
    assert '"text" in quotes' in message


@pytest.mark.parametrize("assignment", ["nonsense", "=3", ""])
def test_an_assignment_without_a_key_and_a_value_is_refused(assignment: str) -> None:
    with pytest.raises(ConfigError, match=r"must have the form a\.b=c, got .*; write for example"):
        parse_config("", assignments=[assignment], source="x")


def test_the_same_variable_in_two_cases_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"diloco_seed: .* once, got it from .*DILOCO_SEED"):
        parse_config("", environment={"DILOCO_SEED": "1", "diloco_seed": "2"}, source="x")


def test_a_file_that_is_no_toml_is_refused_by_name_and_place() -> None:
    with pytest.raises(ConfigError, match=r"^run\.toml: must be TOML, .*line 2.*; correct"):
        parse_config("seed = 1\nstore = file\n", source="run.toml")


def test_an_endless_integer_in_the_file_is_refused() -> None:
    with pytest.raises(ConfigError, match="must be TOML"):
        parse_config(f"seed = {'9' * 5000}", source="run.toml")


def test_a_date_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"got the date or time 2024-01-01; put it in quotes"):
        parse_config("store = 2024-01-01", source="run.toml")


def test_a_json_text_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^run\.json: the configuration must be JSON, got"):
        config_from_json('{"seed": ', source="run.json")


def test_an_assignment_into_a_section_that_the_file_broke_is_refused() -> None:
    with pytest.raises(ConfigError, match="model must be a table, got 3; correct it first"):
        parse_config("model = 3", assignments=["model.width=8"], source="x")


def test_each_line_begins_with_where_the_value_came_from() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(
            "seed = -1",
            environment={"DILOCO_SYNC__ALPHA": "2", "DILOCO_SED": "1"},
            assignments=["islands.west.speed=0", "seed.x=3"],
            source="run.toml",
        )
    assert sorted(line.split(": ")[0] for line in str(caught.value).splitlines()) == [
        "assignment islands.west.speed",
        "assignment seed.x",
        "environment DILOCO_SED",
        "environment DILOCO_SYNC__ALPHA",
        "run.toml",
    ]


# --- text out ----------------------------------------------------------------------------------

FULL = """
store = "s3://bucket/with \\"quotes\\" and \\\\"
retention = "all"
sync = {min_learners = 1, alpha = 0.1, codec = "bfloat16"}
islands = [{name = "a", device = "cuda:1", speed = 1e-3}, {name = "b-1"}]
local.faults = [
    {island = "a", step = 3, return_after_steps = 0},
    {island = "b-1", step = 4},
]
"""


@pytest.mark.parametrize("text", ["", FULL])
def test_the_effective_configuration_reads_back_as_an_equal_one(text: str) -> None:
    config = parse_config(text, source="x")
    assert parse_config(to_toml(config), source="x") == config
    assert config_from_json(config.model_dump_json(), source="x") == config


@settings(deadline=None)
@given(
    learning_rate=st.floats(min_value=0, max_value=1, exclude_min=True),
    clip_norm=st.floats(min_value=0, exclude_min=True, allow_infinity=False),
)
def test_no_digit_of_a_float_is_lost_on_the_way_out_and_in(
    learning_rate: float, clip_norm: float
) -> None:
    config = RunConfig(inner=InnerConfig(learning_rate=learning_rate, clip_norm=clip_norm))
    assert parse_config(to_toml(config), source="x") == config


def test_the_schema_holds_bounds_choices_defaults_and_descriptions() -> None:
    schema = RunConfig.model_json_schema()
    sections = schema["$defs"]
    rate = sections["InnerConfig"]["properties"]["learning_rate"]
    assert (rate["exclusiveMinimum"], rate["maximum"], rate["default"]) == (0, 1, 0.004)
    assert sections["SyncConfig"]["properties"]["chunk_bytes"]["minimum"] == 4096
    assert sections["DataConfig"]["properties"]["held_out_fraction"]["exclusiveMaximum"] == 0.5
    assert sections["OuterConfig"]["properties"]["merge"]["enum"] == ["rda", "mean"]
    assert "pattern" in sections["IslandConfig"]["properties"]["name"]
    assert sections["ClusterConfig"]["properties"]["kind"]["enum"] == ["local", "address"]
    assert sections["PipelineConfig"]["properties"]["max_restarts"]["minimum"] == 0
    for section in (schema, *sections.values()):
        assert section["additionalProperties"] is False
        assert section["description"]
        assert all("description" in field for field in section["properties"].values())


# --- identity ----------------------------------------------------------------------------------


def test_the_identity_holds_exactly_the_identity_keys_in_json() -> None:
    values = identity(RunConfig())
    assert tuple(values) == IDENTITY_KEYS
    assert values["islands.names"] == ["west", "east", "europe", "asia"]
    assert values["model.width"] == 64
    assert json.loads(json.dumps(values)) == values


@pytest.mark.parametrize(
    ("assignment", "changed"),
    [
        ("model.num_layers=3", ["model.num_layers"]),
        ("data.source=/text", ["data.source"]),
        ("data.held_out_fraction=0.1", ["data.held_out_fraction"]),
        ("seed=1", ["seed"]),
        ("sync.num_fragments=2", ["sync.num_fragments"]),
        ("sync.algorithm=streaming", ["sync.algorithm"]),
        ("sync.codec=bfloat16", ["sync.codec"]),
        ("sync.codec_down=float32", ["sync.codec_down"]),
        ("outer.merge=mean", ["outer.merge"]),
        ("islands.west.name=north", ["islands.names"]),
        ("islands.west.speed=2", []),
        ("islands.west.bandwidth_mbit=25", []),
        ("total_tokens=9", []),
        ("sync.period_steps=48", []),
        ("outer.learning_rate=1", []),
        ("pipeline.segment_seconds=5", []),
        ("islands.west.cluster.threads=2", []),
    ],
)
def test_a_change_of_identity_is_named_and_an_operational_one_is_not(
    assignment: str, changed: list[str]
) -> None:
    new = parse_config("", assignments=[assignment], source="x")
    assert changed_identity(identity(RunConfig()), identity(new)) == changed


def test_a_key_that_only_one_side_has_is_a_change_of_identity() -> None:
    assert changed_identity({"a": None}, {"b": 1}) == ["a", "b"]


# --- the process environment -------------------------------------------------------------------


def test_only_our_variables_are_read_from_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DILOCO_SEED", "5")
    monkeypatch.setenv("DILOCOSEED", "6")
    found = read_environment()
    assert found["DILOCO_SEED"] == "5"
    assert all(name.upper().startswith("DILOCO_") for name in found)
    assert parse_config("", environment=found, source="x").seed == 5
