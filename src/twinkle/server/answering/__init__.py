"""How an answer goes out: held polls, streams, large results, downloads."""
