"""Starting the service from a ``server_config.yaml``, as the documents do."""
