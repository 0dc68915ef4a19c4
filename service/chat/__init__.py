"""The text side of chats: conversations into prompts, generated text into content, reasoning and tool calls.

The way through it: `messages` and `template` write the prompt, `forcing` says what may be generated where a call is
asked for, `special_tokens` what of it must be seen, and `splitter` takes the generated text apart. `formats` has a row
for each way in which models write calls. Nothing here knows HTTP, the engine's loop or the model.
"""
