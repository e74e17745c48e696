"""Jobs from the command line: handed over, followed, looked at, exported."""
