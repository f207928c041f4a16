"""Rescue: from a broken 16-bit run to a plan that is verified against FP32."""
