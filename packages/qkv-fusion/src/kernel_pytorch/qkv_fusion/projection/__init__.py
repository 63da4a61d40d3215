"""One projection for queries, keys and values, alone and in front of QK-norm and rotary embedding."""
