"""The ladder, from the definition to CUDA C++; `qkv_fusion/levels.py` says which level is the default where."""
