"""MKL's mode counts only when it is chosen before the first product of the process, so before any test runs."""

from twinkle.model.fused.determinism import prepare_environment

prepare_environment()
