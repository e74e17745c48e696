"""The Twinkle dialect: models, samplers and processors over HTTP, every call of which is an operation."""
