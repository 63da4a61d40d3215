"""The ladder, from the definition to CUDA C++; `fused_ln_act/levels.py` says which level is the default where."""
