"""Whatever computes, behind the one protocol of ``workers/engine.py``: made, loaded and timed."""
