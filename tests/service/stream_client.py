"""A trainer without our library: one rank trains a step, with commands and completions on the session stream alone.

It shares no words with the daemon; parameters and gradients are in the slabs that it maps, as everybody's.
usage: stream_client.py ADDRESS PROTO_FOLDER
exit code 77: a module that it needs is not installed.
"""

import array
import mmap
import queue
import socket
import struct
import subprocess
import sys
import tempfile

try:
    import grpc
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
except ImportError as error:
    print(f"skip: {error}")
    sys.exit(77)

PROTOCOL_VERSION = 13
NUMEL = 8
SHARDS, GRADIENT_SLOTS = 3, 8  # places in the fd channel's answer (common/shm/fd_channel.h)
PHASE_FORWARD, PHASE_BACKWARD = 1, 2


def load(folder):
    with tempfile.NamedTemporaryFile() as out:
        command = ["protoc", "-I", folder, "--include_imports", "--descriptor_set_out", out.name]
        subprocess.run([*command, "shardd/v1/trainer.proto"], check=True)
        files = descriptor_pb2.FileDescriptorSet.FromString(out.read())
    pool = descriptor_pool.DescriptorPool()
    for file in files.file:
        pool.Add(file)
    factory = message_factory.MessageFactory(pool)
    return lambda name: factory.GetPrototype(pool.FindMessageTypeByName("shardd.v1." + name))


def fetch_descriptors(path, attach):
    """The request of 40 bytes, and its answer: see common/shm/fd_channel.h."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        connection.sendall(struct.pack("<4sIQ16sII", b"SHFD", PROTOCOL_VERSION, attach.session_id, attach.token, 0, 0))
        bytes_, fds, _, _ = socket.recv_fds(connection, 4096, 253)
    _, code, _, count = struct.unpack("<4siII", bytes_[:16])
    assert code == 0 and count == len(fds), bytes_[16:]
    return fds


class Stream:
    def __init__(self, channel, message, attach):
        self.request, self.command = message("SessionRequest"), message("Command")
        self.requests = queue.SimpleQueue()
        call = channel.stream_stream(
            "/shardd.v1.TrainerService/Session",
            request_serializer=self.request.SerializeToString,
            response_deserializer=message("SessionEvent").FromString,
        )
        self.requests.put(self.request(hello={"session_id": attach.session_id, "token": attach.token}))
        self.events = call(iter(self.requests.get, None), timeout=60)
        self.words = {}

    def send(self, **command):
        self.requests.put(self.request(commands={"commands": [self.command(**command)]}))

    def until(self, kind="", **words):
        """Reads until an event of that kind has come, and these words have come so far."""
        while kind or any(self.words.get(name, 0) < number for name, number in words.items()):
            event = next(self.events)
            assert not event.HasField("aborted"), event
            if event.HasField("words"):
                self.words.update({field.name: value for field, value in event.words.ListFields()})
            if kind and event.HasField(kind):
                kind = ""
        return event if words == {} else None


def floats(values):
    return array.array("f", values).tobytes()


def main():
    address, folder = sys.argv[1:]
    message = load(folder)
    channel = grpc.insecure_channel(address)

    def call(method, request, response):
        return channel.unary_unary(
            "/shardd.v1.TrainerService/" + method,
            request_serializer=request.SerializeToString,
            response_deserializer=message(response).FromString,
        )(request, timeout=60)

    weight = {"name": "w", "shape": [NUMEL], "dtype": "DTYPE_FLOAT32", "requires_grad": True}
    module = {"class_name": "Model", "parent": -1, "parameters": [weight]}
    config = {"trainers_never_write": True, "optimizer": {"kind": "OPTIMIZER_KIND_SGD"}}
    spec = {"name": "plain", "world_size": 1, "tree": {"modules": [module]}, "config": config}
    opened = call("OpenJob", message("OpenJobRequest")(protocol_version=PROTOCOL_VERSION, spec=spec), "OpenJobResponse")
    request = message("AttachRankRequest")(
        job_id=opened.job_id, rank=0, slots_apart=True, protocol_version=PROTOCOL_VERSION
    )
    attach = call("AttachRank", request, "AttachRankResponse")
    assert attach.tells_words and attach.slots_apart

    stream = Stream(channel, message, attach)
    stream.until("attached")
    stream.requests.put(stream.request(tell_words={}))
    fds = fetch_descriptors(address.removeprefix("unix:"), attach)
    shards = mmap.mmap(fds[SHARDS], 4 * NUMEL, prot=mmap.PROT_READ)
    slots = mmap.mmap(fds[GRADIENT_SLOTS], 4 * NUMEL)

    stream.send(write_parameters={"param": 0, "numel": NUMEL, "values": floats(range(NUMEL))})
    stream.send(commit_parameters={})
    stream.until(version=1, consumed=2)
    assert shards[:] == floats(range(NUMEL))

    stream.send(unshard={"group": 0, "phase": PHASE_FORWARD})
    stream.send(reshard={"group": 0})
    stream.send(unshard={"group": 0, "phase": PHASE_BACKWARD})
    stream.send(reshard={"group": 0})
    slots[: 4 * NUMEL] = floats([2.0] * NUMEL)
    stream.send(submit_gradients={"group": 0})
    stream.send(backward_done={"index": 0, "last": True})
    stream.until(reduced=1)
    assert stream.words["slots"][0].released == 1
    stream.send(step={"groups": [{"lr": 0.5}]})
    committed = stream.until("committed").committed
    assert (committed.step, committed.version) == (1, 2), committed
    stream.until(version=2, consumed=9)
    assert shards[:] == floats(value - 1 for value in range(NUMEL))

    stream.requests.put(stream.request(detach={"finished": True}))
    stream.until("detached")
    stream.requests.put(None)
    print(f"trained 1 step; the words say {sorted(stream.words)}")


if __name__ == "__main__":
    main()
