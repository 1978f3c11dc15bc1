"""Chat templates with the traits of families in use, and conversations that confuse who looks for the assistant's text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from hsx.datasets.turns import Turn

if TYPE_CHECKING:
    from random import Random

# Qwen2.5: a system turn is added, every role is written.
CHATML: Final = r"""{%- if messages[0].role != 'system' %}{{ '<|im_start|>system\nYou are kind.<|im_end|>\n' }}{% endif -%}
{%- for m in messages -%}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif -%}"""
# Qwen3: unknown roles vanish, thinking is cut from earlier turns, the last one gets an empty block.
QWEN3: Final = r"""{%- for m in messages -%}
{%- if m.role in ['user', 'system'] -%}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
{%- elif m.role == 'assistant' -%}
{%- set thought = m.reasoning_content or '' -%}{%- set content = m.content -%}
{%- if not thought and '</think>' in content -%}
{%- set thought = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') -%}
{%- set content = content.split('</think>')[-1].lstrip('\n') -%}
{%- endif -%}
{{ '<|im_start|>assistant\n' }}
{%- if loop.last %}{{ '<think>\n' + thought.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}
{%- else %}{{ content }}{% endif -%}
{{ '<|im_end|>\n' }}
{%- elif m.role == 'tool' -%}
{{ '<|im_start|>user\n<tool_response>\n' + m.content + '\n</tool_response><|im_end|>\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif -%}"""
# Qwen3-Thinking: the generation prompt opens the block.
THINKER: Final = QWEN3.removesuffix(r"assistant\n' }}{% endif -%}") + r"assistant\n<think>\n' }}{% endif -%}"
# Llama 3: every text is stripped.
LLAMA3: Final = r"""{{- bos_token -}}{%- for m in messages -%}
{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' }}
{%- endfor -%}{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif -%}"""
# Gemma: the system turn goes into the first user's, the assistant is called otherwise.
GEMMA: Final = r"""{{- bos_token -}}
{%- set first = messages[0].content + '\n\n' if messages[0].role == 'system' else '' -%}
{%- for m in (messages[1:] if messages[0].role == 'system' else messages) -%}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) -%}{{ raise_exception('roles must alternate') }}{%- endif -%}
{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' + (first if loop.first else '') -}}
{{- m.content | trim + '<end_of_turn>\n' }}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif -%}"""
# Mistral and Llama 2: no generation prompt; white space before the answer; the system turn goes into the last user's.
INST: Final = r"""{{- bos_token -}}
{%- set system = messages[0].content + '\n\n' if messages[0].role == 'system' else '' -%}
{%- for m in (messages[1:] if messages[0].role == 'system' else messages) -%}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) -%}{{ raise_exception('roles must alternate') }}{%- endif -%}
{%- if m.role == 'user' -%}
{{ '[INST] ' + (system if loop.last or loop.revindex == 2 else '') + m.content + ' [/INST]' }}
{%- elif m.role == 'assistant' -%}{{ ' ' + m.content | trim + '</s>' }}
{%- else -%}{{ raise_exception('only user and assistant') }}{%- endif -%}
{%- endfor -%}"""
# DeepSeek-V3: all system turns first, special tokens as headers, no line breaks.
DEEPSEEK: Final = r"""{{- bos_token -}}{%- for m in messages if m.role == 'system' -%}{{ m.content }}{%- endfor -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{{ '<|User|>' + m.content }}
{%- elif m.role == 'assistant' -%}{{ '<|Assistant|>' + m.content + '</s>' }}
{%- elif m.role == 'tool' -%}{{ '<|tool|>' + m.content + '<|/tool|>' }}{%- endif -%}{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|Assistant|>' }}{% endif -%}"""
# GLM: the next turn's header is what ends a turn.
GLM: Final = r"""{{- '[gMASK]' -}}{%- for m in messages -%}{{ '<|' + m.role + '|>\n' + m.content }}{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif -%}"""
# A template that marks the assistant's text itself.
MARKED: Final = r"""{%- for m in messages -%}{{ '<|im_start|>' + m.role + '\n' }}
{%- if m.role == 'assistant' -%}{%- generation -%}{{ m.content + '<|im_end|>' }}{%- endgeneration -%}
{%- else -%}{{ m.content + '<|im_end|>' }}{%- endif -%}{{ '\n' }}{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif -%}"""
FAMILIES: Final = {
    "chatml": CHATML,
    "qwen3": QWEN3,
    "thinker": THINKER,
    "llama3": LLAMA3,
    "gemma": GEMMA,
    "inst": INST,
    "deepseek": DEEPSEEK,
    "glm": GLM,
    "marked": MARKED,
}
SPECIAL: Final = (
    *("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_response>", "</tool_response>"),
    *("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<start_of_turn>", "<end_of_turn>", "[INST]", "[/INST]"),
    *("[gMASK]", *(f"<|{name}|>" for name in ("User", "Assistant", "user", "assistant", "system", "tool", "/tool"))),
)
"""Special tokens of all these templates."""
HEADERS: Final = (
    "<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>assistant\n<think>\n",
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "<end_of_turn>\n<start_of_turn>model\n",
    " [/INST] ",
    "</s>[INST] ",
)
PARTS: Final = (
    *(*HEADERS, *SPECIAL, "<|eot_id|", "im_end|>"),
    *("user", "assistant", "model", "system", "tool", "You are kind.", "probe_answer", "a", "b", "Hello", "0", "1", "true"),
    *(" ", "\n", "\t", "\r\n", "\u00a0", "\u2028", "\u200d", "\u0301", "e\u0301", "é", "😀", "👩\u200d💻", "日本"),
    *("ß", "\0", "\x85", "\ue0f00\ue0f1", "\ue0f0", "\ue0f1", "\ue0f21\ue0f3"),
    *("null", "{{ messages }}", "{% endfor %}", "{#", '"', "\\n", "{}", "[1, 2]"),
)
"""What the texts are made of: headers, special tokens and pieces of them, white space of all kinds, placeholders."""


def conversation(random: Random, *, thoughts: bool) -> list[Turn]:
    """Turns whose text quotes headers, repeats other turns, or is hardly any; no tag of thinking is in the assistant's text.

    Args:
        random: where the choices come from.
        thoughts: the assistant may have thought, in a field of its own.
    """

    def text() -> str:
        return "".join(random.choice(PARTS) for _ in range(random.randrange(5)))

    turns = [Turn("system", text())] if random.random() < 0.4 else []
    orderly = random.random() < 0.6
    for number in range(random.randint(1, 6)):
        role = ("user", "assistant")[number % 2] if orderly else random.choice(("user", "assistant", "assistant", "tool"))
        said = text()
        if turns and random.random() < 0.3:
            earlier = random.choice(turns).content
            said = random.choice((earlier, earlier[: len(earlier) // 2], said + earlier, earlier.strip()))
        thought = ""
        if role == "assistant":
            said = said.replace("<think>", "").replace("</think>", "")
            thought = random.choice(("", "", "so\n", said or "x", "\nwhy? assistant")) if thoughts else ""
        turns.append(Turn(role, said, thought.replace("<think>", "")))
    return turns
