"""A text stream on a disk that is full for a while."""

import io


class Disk(io.StringIO):
    """Takes no text while it is full."""

    full = True

    def write(self, text):
        if self.full:
            raise OSError(28, "No space left on device")
        return super().write(text)
