"""From what the user named to a model and a tokenizer in memory.

    source      a name → a folder with config.json, safetensors and a tokenizer
    checkpoint  is that folder one that can be served? refusals by name
    load        folder → LoadedModel

Knows files, the hub and transformers. Does not know positional plans, patches or the server.
"""
