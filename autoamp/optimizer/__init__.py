"""An optimizer's step: skipped at an overflow, with fp32 masters and closures."""
