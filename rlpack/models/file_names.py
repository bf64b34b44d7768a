"""Names of the weight files in a model folder, as transformers writes them."""

# One file, or the index of several.
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
