"""Which layer a parameter belongs to, in what is logged for each layer."""

WRAPPER = "base_model.model."  # that peft puts around a network
ADAPTERS = ("lora_", "ia3_", "hada_", "lokr_", "oft_", "boft_", "vera_", "modules_to_save")
"""How the parts of a layer begin that peft adds to it; behind them stands the adapter's name."""


def layer_of(parameter: str) -> str:
    """Return the layer that owns a parameter; all parts of an adapter belong to the layer that it adapts.

    Args:
        parameter: Name of the parameter, as in ``named_parameters()``.

    Returns:
        The layer's name, without what peft puts around it; nothing for a parameter of the model
        itself. An adapter that is not called ``"default"`` has its name behind that of the layer.

    Example:
        >>> layer_of("net.0.weight"), layer_of("net.base_model.model.encoder.0.query.lora_A.default.weight")
        ('net.0', 'net.encoder.0.query')
        >>> layer_of("base_model.model.query.lora_B.german.weight")
        'query:german'
    """
    *owners, last = parameter.replace(WRAPPER, "").split(".")
    for place, part in enumerate(owners):
        if part.startswith(ADAPTERS):
            adapter = (owners[place + 1 :] or [last])[0]
            layer = ".".join(owners[:place])
            return layer if adapter == "default" else f"{layer}:{adapter}"
    return ".".join(owners)
