"""Reads TensorBoard's event files."""


def events(folder):
    """Events of TensorBoard's files: length, crc, event, crc."""
    from tensorboardX.proto.event_pb2 import Event

    for path in sorted(folder.glob("events*"), key=lambda path: path.stat().st_mtime):
        data = path.read_bytes()
        while data:
            length = int.from_bytes(data[:8], "little")
            yield Event.FromString(data[12 : 12 + length])
            data = data[16 + length :]
