"""The client package of Twinkle scripts: thin, typed, no torch."""

from twinkle_client.tinker import init_tinker_client, init_tinker_compat_client

__all__ = ["init_tinker_client", "init_tinker_compat_client"]
