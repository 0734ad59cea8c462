"""Values that the commands' `--help` lists; the tests hold them to autoamp's own."""

from __future__ import annotations

PLACEMENTS = ("optimal", "tensorflow", "promote", "forced")
PRECISIONS = ("fp16", "bf16")
CATEGORIES = ("allow", "deny", "infer", "clear")
TARGETS = (*("pt2", "aoti", "onnx", "onnxruntime-cpu", "onnxruntime-cuda", "tensorrt"),)
WAYS = ("fp32", "tf32", "autocast", "autoamp", "half")
