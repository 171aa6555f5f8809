"""Ready parts of a transfer: networks, data, methods, and the stages that make starts and fine-tune them."""
