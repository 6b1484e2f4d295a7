"""The parameters that each system documents for its endpoint of completions."""

from __future__ import annotations

DOCUMENTED = {
    "openai": "model prompt best_of echo frequency_penalty logit_bias logprobs max_tokens n presence_penalty seed stop"
    " stream stream_options suffix temperature top_p user",
    "llama.cpp": "model prompt max_tokens temperature top_p top_k min_p stream stop presence_penalty frequency_penalty"
    " repeat_penalty n seed logprobs echo suffix mirostat mirostat_tau mirostat_eta grammar json_schema cache_prompt",
    "mistral.rs": "best_of dry_allowed_length dry_base dry_multiplier dry_sequence_breakers echo frequency_penalty"
    " grammar logit_bias logprobs max_tokens min_p model n presence_penalty prompt repetition_penalty stop stream"
    " suffix temperature tool_choice tools top_k top_p truncate_sequence user",
    "fireworks": "model prompt context_length_exceeded_behavior echo frequency_penalty ignore_eos images logprobs"
    " max_tokens mirostat_lr mirostat_target n presence_penalty repetition_penalty response_format stop stream"
    " temperature top_k top_p user",
    "omlx": "model prompt stream stream_options max_tokens temperature top_p min_p stop seed presence_penalty"
    " frequency_penalty xtc_probability xtc_threshold",
    "sglang": "model prompt max_tokens temperature top_p top_k min_p n seed stop stop_token_ids frequency_penalty"
    " presence_penalty repetition_penalty response_format json_schema regex ebnf stream stream_options echo logprobs"
    " logit_bias best_of suffix ignore_eos skip_special_tokens no_stop_trim stop_regex min_tokens lora_path"
    " return_hidden_states return_routed_experts return_cached_tokens_details",
    "vllm": "model prompt echo frequency_penalty logit_bias logprobs max_tokens n presence_penalty seed stop stream"
    " stream_options suffix temperature top_p user use_beam_search top_k min_p repetition_penalty length_penalty"
    " stop_token_ids include_stop_str_in_output ignore_eos min_tokens skip_special_tokens"
    " spaces_between_special_tokens truncate_prompt_tokens truncation_side allowed_token_ids prompt_logprobs bad_words"
    " prompt_embeds add_special_tokens response_format structured_outputs priority request_id return_token_ids"
    " return_tokens_as_token_ids cache_salt kv_transfer_params vllm_xargs",
}
