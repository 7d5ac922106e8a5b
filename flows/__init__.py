"""What runs, in what order; the command line is the composition root."""
