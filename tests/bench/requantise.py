"""Writes a GGUF file again with its weights in another type, so that types can be compared on one shape.

usage: requantise.py --in FILE.gguf --out FILE.gguf --type q4_0
needs: numpy gguf

Weights are opened to float32 and rounded once more: good for speed, not for quality. Vectors (norms) stay as they are. Keep
the file out of the repository.
"""

import argparse

import gguf
from gguf import GGMLQuantizationType as Q

KINDS = {k.name.lower(): k for k in (Q.F32, Q.F16, Q.BF16, Q.Q4_0, Q.Q4_1, Q.Q5_0, Q.Q5_1, Q.Q8_0)}


def copy_fields(reader, writer):
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == gguf.Keys.General.ARCHITECTURE:
            continue
        kind = field.types[0]
        element = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), kind, sub_type=element)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--in", required=True, dest="source", metavar="FILE")
    parser.add_argument("--out", required=True, metavar="FILE")
    parser.add_argument("--type", required=True, choices=KINDS)
    a = parser.parse_args()
    reader = gguf.GGUFReader(a.source)
    writer = gguf.GGUFWriter(a.out, reader.get_field(gguf.Keys.General.ARCHITECTURE).contents())
    copy_fields(reader, writer)
    for tensor in reader.tensors:
        if len(tensor.shape) < 2:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
            continue
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        writer.add_tensor(tensor.name, gguf.quants.quantize(values, KINDS[a.type]), raw_dtype=KINDS[a.type])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
