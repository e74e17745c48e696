"""Twinkle: a shared training service, and the training library behind it.

Importing this package is cheap: torch, SQLAlchemy and Celery load only with the part that needs them.
"""

__version__ = "0.1.0"
