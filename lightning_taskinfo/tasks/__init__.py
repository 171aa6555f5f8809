"""Questions about tasks: simulated transfer between a source and a target whose relation is known."""
