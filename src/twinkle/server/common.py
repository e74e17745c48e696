"""What client scripts import from here: importing it lets the official SDK send any key to a Twinkle server.

Scripts of the documents import this and never call ``init_tinker_client``; the SDK would refuse their keys before
anything is sent. Nothing of the server is loaded.
"""

from twinkle_client.tinker import input_feature_to_datum, take_any_key

__all__ = ["input_feature_to_datum"]

take_any_key()
