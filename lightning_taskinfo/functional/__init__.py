"""Pure functions: torch only, any float dtype, no Lightning, no logging."""
