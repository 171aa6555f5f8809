"""Questions about tasks: complexity, distance, and simulated transfer whose answer is known."""
