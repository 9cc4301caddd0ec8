from gradwire.proto.v1 import autograd_pb2 as _autograd_pb2
from gradwire.proto.v1 import describe_pb2 as _describe_pb2
from gradwire.proto.v1 import link_pb2 as _link_pb2
from google.protobuf import descriptor as _descriptor
from typing import ClassVar as _ClassVar

DESCRIPTOR: _descriptor.FileDescriptor
