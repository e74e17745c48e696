"""The process that runs jobs: the API in process, the plans, and what those need of the training library."""
