"""Chat templates as exact token ids: what stands between two generations, or a refusal that names its rule.

Everything refused is a :class:`~fsm_rollout.errors.ChatTemplateError` whose ``rule`` is one of these.

What the template does:

- ``no-template``, ``template-syntax``: there is none, or Jinja cannot compile it.
- ``template-raised``: it raises on these messages (role order, parallel calls, call ids, …).
- ``no-close-token``: it writes no token that ends the assistant's turn.
- ``tools-not-shown``: it writes nothing of the tools that an agent's model is to call.
- ``no-thinking``: it writes no thinking that could be closed (``thinking_tokens``).
- ``message-dropped``, ``message-altered``: the text of a message is not in what it writes.
- ``turn-dropped``: neither the text nor the calls of the last turn are in what it writes.
- ``text-moved``: text is not where its tokens are: a message stands before the turn it follows, or the turn's close
  depends on its text.

- ``glue-mismatch``: glue from the cache was found to differ from the full render (a
  :class:`~fsm_rollout.errors.GlueMismatchError`, which names the entry).

What the messages hold:

- ``malformed-message``, ``no-new-message``, ``assistant-in-new``: they are not OpenAI-style messages in order.
- ``malformed-tools``: they are not a list.
- ``multimodal-content``: a part that is neither text nor a picture, or a picture for a model that reads text only.
- ``pictures-dropped``: the template writes no placeholder that the model's processor knows, or fewer than there are
  pictures.
- ``text-not-unicode``: a lone surrogate.
- ``injected-marker``: a control token in a message, with ``injection="raise"``, or in a name or call id; one that
  stands for a picture, where there is none.
- ``not-a-stop-token``: the last sampled id of a turn that stopped is no control token.

What the caller asks for:

- ``slow-tokenizer``, ``unknown-close-token``, ``unknown-option``.
- of :mod:`fsm_rollout.chat.formats`: ``unknown-tool-format``, ``ambiguous-tool-format``, ``missing-extra``,
  ``format-needs-tokenizer``, ``tokenizer-mismatch``.
"""

from fsm_rollout.chat.markers import Encoded
from fsm_rollout.chat.template import ChatTemplate

__all__ = ["ChatTemplate", "Encoded"]
