"""The JSON bodies of the Tinker protocol, by topic: one class for each request and each answer."""
