# The control: the LayerNorm detector trained on, with the same budget and no other change.
_base_ = ['./schedule.py']

custom_hooks = []
