"""Chat templates in the style of well-known models, and tokenizers for them."""

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CHATML = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

LLAMA3 = """{{ bos_token }}{% for m in messages %}<|start|>{{ m.role }}<|stop|>

{{ m.content | trim }}<|eot|>{% endfor %}{% if add_generation_prompt %}<|start|>assistant<|stop|>

{% endif %}"""

GEMMA = """{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}
{{ raise_exception('System role not supported') }}{% endif %}<start_of_turn>{{
'model' if m.role == 'assistant' else m.role }}
{{ m.content | trim }}<end_of_turn>
{% endfor %}{% if add_generation_prompt %}<start_of_turn>model
{% endif %}"""

# Earlier answers lose their thoughts, the last one shows a place for them.
QWEN3 = """{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}
{%- set ns.last = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.role == 'assistant' %}{% set parts = m.content.split('</think>') %}{% if loop.index0 > ns.last %}<think>
{{ parts[0].split('<think>')[-1].strip() if parts | length > 1 else '' }}
</think>

{% endif %}{{ parts[-1].strip() }}{% else %}{{ m.content }}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

# The system message goes with the last question, so that every turn changes what was written before.
MISTRAL = """{{ bos_token }}{% set ns = namespace(system='') %}{% for m in messages %}{% if m.role == 'system' %}
{%- set ns.system = m.content %}{% elif m.role == 'user' %}{% set later = messages[loop.index0 + 1:] |
selectattr('role', 'equalto', 'user') | list %}[INST] {{ ns.system + '\n\n' if ns.system and not later }}{{
m.content }}[/INST]{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"""

# A further end stands behind a conversation, but not behind one that goes on.
PHI3 = """{% for m in messages %}<|{{ m.role }}|>
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|assistant|>
{% else %}{{ eos_token }}{% endif %}"""

# The question for an answer opens a thought, which the written answer has no more.
DEEPSEEK = """{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}<|assistant|>{{
m.content.split('</think>')[-1] }}{{ eos_token }}{% else %}<|{{ m.role }}|>{{ m.content }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|assistant|><think>
{% endif %}"""

MARKED = """{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}
{{- '' }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

TEMPLATES = {
    "chatml": CHATML,
    "llama3": LLAMA3,
    "gemma": GEMMA,
    "qwen3": QWEN3,
    "mistral": MISTRAL,
    "phi3": PHI3,
    "deepseek": DEEPSEEK,
    "marked": MARKED,
}

SPECIAL = ("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start|>", "<|stop|>", "<|eot|>", "<start_of_turn>")
SPECIAL += ("<end_of_turn>", "<|user|>", "<|system|>", "<|assistant|>")


def chat_tokenizer(template: str | None) -> PreTrainedTokenizerFast:
    """One token a byte, but `A` and a line break before it are one: a token can lie over a border."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: index for index, symbol in enumerate([*alphabet, "ĊA"])}
    tokenizer = Tokenizer(models.BPE(vocab, merges=[("Ċ", "A")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.add_tokens([AddedToken(word, special=True, normalized=False) for word in SPECIAL])
    fast.chat_template = template
    return fast
