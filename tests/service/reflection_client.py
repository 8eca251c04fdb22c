"""A client that knows nothing about shardd: lists, describes and calls its services by reflection.

usage: reflection_client.py ADDRESS list | describe SYMBOL | call SERVICE METHOD [FIELD=VALUE]
exit code 77: a module or file that it needs is not installed.
"""

import os
import subprocess
import sys
import tempfile

PROTO_DIR = "/usr/share/grpc-proto"
REFLECTION = "grpc/reflection/v1alpha/reflection.proto"

try:
    import grpc
    from google.protobuf import descriptor_pb2, descriptor_pool, json_format, message_factory
except ImportError as error:
    print(f"skip: {error}")
    sys.exit(77)
if not os.path.exists(os.path.join(PROTO_DIR, REFLECTION)):
    print(f"skip: {PROTO_DIR}/{REFLECTION} is not installed (package grpc-proto)")
    sys.exit(77)


def load_reflection_protocol():
    with tempfile.NamedTemporaryFile() as out:
        subprocess.run(["protoc", "-I", PROTO_DIR, "--descriptor_set_out", out.name, REFLECTION], check=True)
        files = descriptor_pb2.FileDescriptorSet.FromString(out.read())
    pool = descriptor_pool.DescriptorPool()
    for file in files.file:
        pool.Add(file)
    return pool


def message_class(pool, name):
    return message_factory.MessageFactory(pool).GetPrototype(pool.FindMessageTypeByName(name))


class Client:
    def __init__(self, address):
        self.channel = grpc.insecure_channel(address)
        pool = load_reflection_protocol()
        package = "grpc.reflection.v1alpha."
        self.request_class = message_class(pool, package + "ServerReflectionRequest")
        response_class = message_class(pool, package + "ServerReflectionResponse")
        self.stream = self.channel.stream_stream(
            "/" + package + "ServerReflection/ServerReflectionInfo",
            request_serializer=self.request_class.SerializeToString,
            response_deserializer=response_class.FromString,
        )
        self.pool = descriptor_pool.DescriptorPool()
        self.known = set()

    def ask(self, **fields):
        response = next(self.stream(iter([self.request_class(**fields)]), timeout=20))
        if response.HasField("error_response"):
            raise SystemExit(f"{fields}: {response.error_response.error_message}")
        return response

    def services(self):
        return [s.name for s in self.ask(list_services="*").list_services_response.service]

    def load(self, **fields):
        for data in self.ask(**fields).file_descriptor_response.file_descriptor_proto:
            file = descriptor_pb2.FileDescriptorProto.FromString(data)
            if file.name in self.known:
                continue
            self.known.add(file.name)
            for dependency in file.dependency:
                if dependency not in self.known:
                    self.load(file_by_filename=dependency)
            self.pool.Add(file)

    def service(self, name):
        self.load(file_containing_symbol=name)
        return self.pool.FindServiceByName(name)

    def call(self, service, method_name, fields):
        method = self.service(service).FindMethodByName(method_name)
        factory = message_factory.MessageFactory(self.pool)
        request = factory.GetPrototype(method.input_type)()
        for field in fields:
            # "a.b=1": nested; numbers as the field's type has them.
            path, value = field.split("=", 1)
            *parents, key = path.split(".")
            target = request
            for parent in parents:
                target = getattr(target, parent)
            kind = type(getattr(target, key))
            setattr(target, key, kind(value) if kind in (int, float) else value)
        call = self.channel.unary_unary(
            f"/{service}/{method_name}",
            request_serializer=type(request).SerializeToString,
            response_deserializer=factory.GetPrototype(method.output_type).FromString,
        )
        return json_format.MessageToJson(call(request, timeout=20), indent=0, preserving_proto_field_name=True)


def main(arguments):
    client = Client(arguments[0])
    if arguments[1] == "list":
        print("\n".join(client.services()))
    elif arguments[1] == "describe":
        service = client.service(arguments[2])
        for method in service.methods:
            print(f"{method.name}({method.input_type.full_name}) -> {method.output_type.full_name}")
    else:
        print(client.call(arguments[2], arguments[3], arguments[4:]))


main(sys.argv[1:])
