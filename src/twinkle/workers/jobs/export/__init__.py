"""Checkpoints in the forms of other tools: PEFT's folder, a merged model, GGUF. Files in, files out; no network."""
