"""Compact chat templates that print what those of well-known model families print."""

HERMES = (
    "{% if tools %}<|im_start|>system\nFunctions, one a line: <tools>\n"
    "{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}</tools>\n"
    'Call one so: <tool_call>\n{"name": ..., "arguments": ...}\n</tool_call><|im_end|>\n{% endif %}'
    "{% for m in messages %}<|im_start|>{% if m.role == 'tool' %}user\n<tool_response>\n{{ m.content }}\n"
    "</tool_response>{% else %}{{ m.role }}\n{{ m.content }}{% endif %}"
    "{% for call in m.tool_calls %}\n<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
"""Qwen 2.5 and 3: the model opens the reasoning itself, and the template closes it if it is switched off."""

THINKING = HERMES.replace("<think>\n\n</think>\n\n{% endif %}", "{% endif %}<think>\n")
"""Opens the reasoning in the prompt."""

LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ 'ipython' if m.role == 'tool' else m.role }}"
    "<|end_header_id|>\n\n{% if m.tool_calls %}"
    '{"name": "{{ m.tool_calls[0].function.name }}", '
    '"parameters": {{ m.tool_calls[0].function.arguments | tojson }}}<|eom_id|>'
    "{% else %}{% if loop.first and tools %}{% for tool in tools %}{{ tool | tojson(indent=4) }}\n{% endfor %}"
    "{% endif %}{{ m.content | trim }}<|eot_id|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)

MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system role') }}"
    "{% elif m.role == 'user' %}{% if loop.last and tools %}[AVAILABLE_TOOLS] {{ tools | tojson }}"
    "[/AVAILABLE_TOOLS]{% endif %}[INST] {{ m.content }}[/INST]"
    "{% elif m.role == 'tool' %}[TOOL_RESULTS] {{ m.content }}[/TOOL_RESULTS]"
    "{% elif m.tool_calls %}[TOOL_CALLS] [{% for call in m.tool_calls %}"
    "{% if call.id | length != 9 %}{{ raise_exception('call ids have nine characters') }}{% endif %}"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}, '
    '"id": "{{ call.id }}"}{{ ", " if not loop.last }}{% endfor %}]{{ eos_token }}'
    "{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)

DEEPSEEK_V3 = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}<｜User｜>{{ m.content }}"
    "{% elif m.role == 'tool' %}<｜tool▁outputs▁begin｜>{{ m.content }}<｜tool▁outputs▁end｜>"
    "{% elif m.tool_calls %}<｜Assistant｜><｜tool▁calls▁begin｜>{% for call in m.tool_calls %}"
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ call.function.name }}\n```json\n"
    "{{ call.function.arguments | tojson }}\n```<｜tool▁call▁end｜>{% endfor %}<｜tool▁calls▁end｜>"
    "{% else %}<｜Assistant｜>{{ m.content.split('</think>')[-1] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<｜Assistant｜>{% endif %}"
)
"""The template knows about reasoning; the model opens it."""

DEEPSEEK_V31 = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}<｜User｜>{{ m.content }}"
    "{% elif m.role == 'tool' %}<｜tool▁output▁begin｜>{{ m.content }}<｜tool▁output▁end｜>"
    "{% elif m.tool_calls %}<｜Assistant｜></think><｜tool▁calls▁begin｜>{% for call in m.tool_calls %}"
    "<｜tool▁call▁begin｜>{{ call.function.name }}<｜tool▁sep｜>{{ call.function.arguments }}"
    "<｜tool▁call▁end｜>{% endfor %}<｜tool▁calls▁end｜>"
    "{% else %}<｜Assistant｜></think>{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<｜Assistant｜>{{ '<think>' if thinking else '</think>' }}{% endif %}"
)
"""``thinking`` decides; arguments are printed as a string."""
