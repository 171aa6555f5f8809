"""From a source task to a target: what a network holds on to, and whether it helps."""
