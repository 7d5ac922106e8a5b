"""The rules between the fields of a configuration.

This module knows which combinations of options are impossible or without effect; it must not know
where a value came from, and decides nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from islands.overrides import shown

if TYPE_CHECKING:
    from islands.config import RunConfig
    from islands.sections import ClusterConfig, SyncConfig


# What an algorithm is made of: with another value it would be another algorithm under the same name.
FIXED_VALUES: Mapping[str, Mapping[str, object]] = {
    "diloco": {"sync.num_fragments": 1, "sync.alpha": 0.0},
    "data-parallel": {
        "sync.num_fragments": 1,
        "sync.period_steps": 1,
        "sync.alpha": 0.0,
        "sync.codec": "float32",
        "sync.codec_down": "float32",
        "outer.merge": "mean",
        "outer.weighting": "tokens",
    },
}


def broken_rules(config: RunConfig) -> Iterator[str]:
    """Yield one line `path rule, got value; remedy` for each rule that the configuration breaks."""
    model, sync, names = config.model, config.sync, [island.name for island in config.islands]
    if model.width % model.num_heads:
        yield (
            f"model.width must be a multiple of model.num_heads ({model.num_heads}), got {model.width}; "
            f"try {model.num_heads * max(1, round(model.width / model.num_heads))}"
        )
    if config.data.eval_bytes <= model.context:
        yield (
            f"data.eval_bytes must be > model.context ({model.context}), got {config.data.eval_bytes}; "
            "raise it, or no sequence can be scored"
        )
    if twice := sorted({name for name in names if names.count(name) > 1}):
        yield f"islands must have unique names, got {', '.join(twice)} more than once; rename one of them"
    members = [island.name for island in config.members]
    for index, fault in enumerate(config.local.faults):
        if fault.island not in members:
            yield (
                f"local.faults.{index}.island must name an island ({', '.join(members)}), "
                f"got {shown(fault.island)}; correct the name or remove the fault"
            )
    if not members:
        yield "islands must have one that is no spare, got spares alone; set spare = false on one"
    if members and sync.min_learners is not None and sync.min_learners > len(members):
        yield (
            f"sync.min_learners must be <= the number of islands ({len(members)}), got {sync.min_learners}; "
            "lower it or add islands"
        )
    if sync.period_steps < sync.num_fragments:
        yield (
            f"sync.period_steps must be >= sync.num_fragments ({sync.num_fragments}), got {sync.period_steps}; "
            "lengthen the period or use fewer fragments"
        )
    for island in config.islands:
        yield from _broken_cluster_rules(f"islands.{island.name}.cluster", island.cluster)
    yield from _broken_blocking_rules(sync, num_islands=len(members))
    yield from _broken_fixed_values(config)
    if sync.blocks and len(members) < len(names):
        yield (
            f"islands.{next(i.name for i in config.islands if i.spare)}.spare must be false where learners wait for "
            f"one another (sync.algorithm {sync.algorithm}), got true; remove that island, or choose decoupled"
        )
    yield from _broken_quarantine_rules(config.quarantine, members, sync.min_learners or 1)
    if config.quarantine and sync.blocks:
        yield (
            f"quarantine must be empty where learners wait for one another (sync.algorithm {sync.algorithm}), "
            f"got {', '.join(config.quarantine)}; release it, or choose decoupled"
        )


def _broken_cluster_rules(path: str, cluster: ClusterConfig) -> Iterator[str]:
    if cluster.kind == "address" and cluster.address is None:
        yield f'{path}.address is required with kind "address", got nothing; name the scheduler'
    if cluster.kind == "local" and cluster.address is not None:
        yield (
            f'{path}.address must be absent with kind "local", got {shown(cluster.address)}; '
            'remove it or set kind = "address"'
        )
    for name, value in (("spares", cluster.spares or None), ("memory_mb", cluster.memory_mb)):
        if cluster.kind == "address" and value is not None:
            yield (
                f'{path}.{name} must be absent with kind "address", got {value}; '
                "whoever runs that scheduler starts its workers, so set it there"
            )
    files = [cluster.ca_file, cluster.cert_file, cluster.key_file]
    is_tls = (cluster.address or "").startswith("tls://")
    if any(files) and not is_tls:
        yield (
            f"{path}.address must begin with tls:// where certificates are named, got {_shown(cluster.address)}; "
            "correct the address or remove the files"
        )
    if is_tls and not (cluster.ca_file and cluster.cert_file):
        yield (
            f"{path}.ca_file and cert_file are required with a tls:// scheduler, got {_shown(cluster.ca_file)} and "
            f"{_shown(cluster.cert_file)}; name both"
        )


def _broken_blocking_rules(sync: SyncConfig, *, num_islands: int) -> Iterator[str]:
    if sync.algorithm != "streaming" and sync.overlap_steps:
        yield (
            f"sync.overlap_steps must be 0 unless sync.algorithm is streaming ({sync.algorithm}), "
            f"got {sync.overlap_steps}; remove it or choose streaming"
        )
    if sync.blocks and sync.min_learners is not None and sync.min_learners < num_islands:
        yield (
            f"sync.min_learners must be the number of islands ({num_islands}) under {sync.algorithm}, "
            f"got {sync.min_learners}; remove it or choose decoupled"
        )
    if sync.algorithm != "streaming":
        return
    if sync.period_steps % sync.num_fragments:
        yield (
            f"sync.period_steps must be a multiple of sync.num_fragments ({sync.num_fragments}) under streaming, "
            f"got {sync.period_steps}; try {sync.num_fragments * -(-sync.period_steps // sync.num_fragments)}"
        )
    if sync.overlap_steps * sync.num_fragments >= sync.period_steps:
        yield (
            f"sync.overlap_steps must be < sync.period_steps / sync.num_fragments "
            f"({sync.period_steps / sync.num_fragments:g}), got {sync.overlap_steps}; lower it"
        )


def _broken_fixed_values(config: RunConfig) -> Iterator[str]:
    for path, value in FIXED_VALUES.get(config.sync.algorithm, {}).items():
        section, _, name = path.partition(".")
        got = getattr(getattr(config, section), name)
        if got != value:
            text = value if isinstance(value, str) else shown(value)
            yield (
                f"{path} must be {text} under {config.sync.algorithm}, got {shown(got)}; "
                f"add --set {path}={text}"
            )


def _broken_quarantine_rules(
    quarantine: Sequence[str], names: Sequence[str], least: int
) -> Iterator[str]:
    if strangers := [name for name in quarantine if name not in names]:
        yield (
            f"quarantine must name islands ({', '.join(names)}), got {shown(strangers[0])}; "
            "correct the name or remove it"
        )
    num_left = len(set(names) - set(quarantine))
    if quarantine and num_left < least:
        yield (
            f"quarantine must leave as many islands as a merge needs ({least}), got {num_left} left; "
            "release one, or lower sync.min_learners"
        )


def _shown(value: str | None) -> str:
    return "nothing" if value is None else shown(value)
