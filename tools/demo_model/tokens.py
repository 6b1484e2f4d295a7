"""Names the special tokens of the demo model."""

END_OF_TEXT = "<|endoftext|>"
FIM_PREFIX = "<|fim_prefix|>"
FIM_SUFFIX = "<|fim_suffix|>"
FIM_MIDDLE = "<|fim_middle|>"
IM_START = "<|im_start|>"
IM_END = "<|im_end|>"

SPECIAL_TOKENS = (END_OF_TEXT, FIM_PREFIX, FIM_SUFFIX, FIM_MIDDLE, IM_START, IM_END)
