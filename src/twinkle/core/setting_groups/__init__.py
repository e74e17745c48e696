"""The settings by what they are about; :class:`twinkle.core.settings.Settings` is all of them together."""
