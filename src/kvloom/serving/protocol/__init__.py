"""Requests as clients write them: fields, messages, tools, pictures and grammars, read and checked."""
