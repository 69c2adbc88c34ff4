"""Files, bytes and text: `codec` is the one way in which values with tensors become bytes, `files` writes whole files
or none, `lock` keeps other processes out of a folder, `text` makes text from outside safe to show. Nothing is pickled.
"""
