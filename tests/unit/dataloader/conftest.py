from __future__ import annotations

from harness.rows import own_data_cache, template, template_folder

__all__ = ["own_data_cache", "template", "template_folder"]
