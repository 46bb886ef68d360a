"""Generated from schema/program.fbs by tools/generate_schema. Do not edit.

The one table that drives encoding, verifying, decoding and docs/format.md.
"""

from stitch.flatbuffer import FieldSpec, Schema, TableSpec

SCHEMA_SHA256 = "1edee19ac0027527e244fc75d06eb834c8cbf794b1a067c918c4e7331504e5a5"
FILE_IDENTIFIER = b"STCH"
ROOT = "Binary"

ENUMS: dict[str, tuple[str, ...]] = {
    'DataType': ('FLOAT32', 'FLOAT16', 'BFLOAT16', 'FLOAT64', 'INT8', 'INT16', 'INT32', 'INT64', 'UINT8', 'UINT16', 'UINT32', 'UINT64', 'BOOL', 'BFP8', 'BFP4', 'FLOAT8_E4M3FN', 'FLOAT8_E4M3FNUZ', 'FLOAT8_E5M2', 'FLOAT8_E5M2FNUZ', 'FLOAT8_E8M0', 'FLOAT4_E2M1', 'INT4', 'UINT4', 'INT2', 'UINT2'),
    'Space': ('HOST', 'DRAM', 'L1'),
    'MemoryLayout': ('INTERLEAVED', 'HEIGHT_SHARDED', 'WIDTH_SHARDED', 'BLOCK_SHARDED'),
    'Orientation': ('ROW_MAJOR', 'COL_MAJOR'),
    'InputKind': ('ACTIVATION', 'PARAMETER', 'STATE', 'SAVED', 'KEY'),
    'Ownership': ('BORROW', 'DONATE'),
    'Role': ('FORWARD', 'LOSS', 'BACKWARD', 'UPDATE'),
    'MathFidelity': ('BY_TYPE', 'LOFI', 'HIFI2', 'HIFI3', 'HIFI4'),
    'SizeRelation': ('EQUAL', 'NOT_EQUAL', 'LESS', 'LESS_OR_EQUAL'),
}

#: The tables of each union; type codes count from 1.
UNIONS: dict[str, tuple[str, ...]] = {
    'AttributeValue': ('IntAttribute', 'FloatAttribute', 'StringAttribute', 'IntsAttribute', 'FloatsAttribute', 'StringsAttribute'),
}

TABLES: dict[str, TableSpec] = {
    'Version': TableSpec('Version', (
        FieldSpec(slot=0, name='major', kind='scalar', code='H', default=0),
        FieldSpec(slot=1, name='minor', kind='scalar', code='H', default=0),
    )),
    'ShardSpec': TableSpec('ShardSpec', (
        FieldSpec(slot=0, name='grid_rows', kind='scalar', code='I', default=1, minimum=1),
        FieldSpec(slot=1, name='grid_columns', kind='scalar', code='I', default=1, minimum=1),
        FieldSpec(slot=2, name='rows', kind='scalar', code='Q', default=1, minimum=1),
        FieldSpec(slot=3, name='columns', kind='scalar', code='Q', default=1, minimum=1),
        FieldSpec(slot=4, name='orientation', kind='scalar', code='B', of='Orientation', default=0, maximum=1),
    )),
    'Layout': TableSpec('Layout', (
        FieldSpec(slot=0, name='data_type', kind='scalar', code='B', of='DataType', default=0, maximum=24),
        FieldSpec(slot=1, name='space', kind='scalar', code='B', of='Space', default=0, maximum=2),
        FieldSpec(slot=2, name='tile_rows', kind='scalar', code='I', default=0),
        FieldSpec(slot=3, name='tile_columns', kind='scalar', code='I', default=0),
        FieldSpec(slot=4, name='memory_layout', kind='scalar', code='B', of='MemoryLayout', default=0, maximum=3),
        FieldSpec(slot=5, name='shard_spec', kind='table', of='ShardSpec'),
        FieldSpec(slot=6, name='address', kind='scalar', code='q', default=-1, minimum=-1),
    )),
    'ValueType': TableSpec('ValueType', (
        FieldSpec(slot=0, name='shape', kind='scalars', code='q', minimum=0, limit=32),
        FieldSpec(slot=1, name='data_type', kind='scalar', code='B', of='DataType', default=0, maximum=24),
    )),
    'Value': TableSpec('Value', (
        FieldSpec(slot=0, name='name', kind='string', limit=1024),
        FieldSpec(slot=1, name='type', kind='table', of='ValueType', required=True, pooled=True),
        FieldSpec(slot=2, name='layout', kind='table', of='Layout', required=True, pooled=True),
    )),
    'IntAttribute': TableSpec('IntAttribute', (
        FieldSpec(slot=0, name='value', kind='scalar', code='q', default=0),
    )),
    'FloatAttribute': TableSpec('FloatAttribute', (
        FieldSpec(slot=0, name='value', kind='scalar', code='d', default=0.0),
    )),
    'StringAttribute': TableSpec('StringAttribute', (
        FieldSpec(slot=0, name='value', kind='string'),
    )),
    'IntsAttribute': TableSpec('IntsAttribute', (
        FieldSpec(slot=0, name='values', kind='scalars', code='q'),
    )),
    'FloatsAttribute': TableSpec('FloatsAttribute', (
        FieldSpec(slot=0, name='values', kind='scalars', code='d'),
    )),
    'StringsAttribute': TableSpec('StringsAttribute', (
        FieldSpec(slot=0, name='values', kind='strings'),
    )),
    'Attribute': TableSpec('Attribute', (
        FieldSpec(slot=0, name='name', kind='string', limit=1024, required=True),
        FieldSpec(slot=1, name='value', kind='union', of='AttributeValue', required=True),
    )),
    'Operation': TableSpec('Operation', (
        FieldSpec(slot=0, name='op', kind='string', limit=1024, required=True),
        FieldSpec(slot=1, name='domain', kind='string', limit=1024),
        FieldSpec(slot=2, name='inputs', kind='scalars', code='i', minimum=-1),
        FieldSpec(slot=3, name='outputs', kind='scalars', code='i', minimum=-1),
        FieldSpec(slot=4, name='attributes', kind='tables', of='Attribute'),
        FieldSpec(slot=5, name='location', kind='string', limit=4096),
        FieldSpec(slot=6, name='body', kind='scalar', code='i', default=-1, minimum=-1),
        FieldSpec(slot=7, name='math_fidelity', kind='scalar', code='B', of='MathFidelity', default=0, maximum=4),
        FieldSpec(slot=8, name='opset', kind='scalar', code='I', default=0),
    )),
    'InputSlot': TableSpec('InputSlot', (
        FieldSpec(slot=0, name='name', kind='string', limit=1024, required=True),
        FieldSpec(slot=1, name='value', kind='scalar', code='I', default=0),
        FieldSpec(slot=2, name='kind', kind='scalar', code='B', of='InputKind', default=0, maximum=4),
        FieldSpec(slot=3, name='ownership', kind='scalar', code='B', of='Ownership', default=0, maximum=1),
    )),
    'OutputSlot': TableSpec('OutputSlot', (
        FieldSpec(slot=0, name='name', kind='string', limit=1024, required=True),
        FieldSpec(slot=1, name='value', kind='scalar', code='I', default=0),
        FieldSpec(slot=2, name='aliases_input', kind='scalar', code='i', default=-1, minimum=-1),
    )),
    'Constant': TableSpec('Constant', (
        FieldSpec(slot=0, name='value', kind='scalar', code='I', default=0),
        FieldSpec(slot=1, name='segment', kind='scalar', code='I', default=0),
    )),
    'BodyValue': TableSpec('BodyValue', (
        FieldSpec(slot=0, name='name', kind='string', limit=1024),
        FieldSpec(slot=1, name='type', kind='table', of='ValueType', required=True, pooled=True),
    )),
    'Body': TableSpec('Body', (
        FieldSpec(slot=0, name='inputs', kind='scalars', code='i', minimum=-1),
        FieldSpec(slot=1, name='outputs', kind='scalars', code='I'),
        FieldSpec(slot=2, name='values', kind='tables', of='BodyValue'),
        FieldSpec(slot=3, name='operations', kind='tables', of='Operation'),
        FieldSpec(slot=4, name='constants', kind='tables', of='Constant'),
    )),
    'Scratch': TableSpec('Scratch', (
        FieldSpec(slot=0, name='space', kind='scalar', code='B', of='Space', default=0, maximum=2),
        FieldSpec(slot=1, name='size_per_bank', kind='scalar', code='Q', default=0),
    )),
    'Seam': TableSpec('Seam', (
        FieldSpec(slot=0, name='first', kind='scalar', code='I', default=0),
        FieldSpec(slot=1, name='held', kind='scalars', code='I'),
    )),
    'Program': TableSpec('Program', (
        FieldSpec(slot=0, name='name', kind='string', limit=1024, required=True),
        FieldSpec(slot=1, name='role', kind='scalar', code='B', of='Role', default=0, maximum=3),
        FieldSpec(slot=2, name='inputs', kind='tables', of='InputSlot'),
        FieldSpec(slot=3, name='outputs', kind='tables', of='OutputSlot'),
        FieldSpec(slot=4, name='values', kind='tables', of='Value'),
        FieldSpec(slot=5, name='operations', kind='tables', of='Operation'),
        FieldSpec(slot=6, name='constants', kind='tables', of='Constant'),
        FieldSpec(slot=7, name='scratch', kind='table', of='Scratch', required=True),
        FieldSpec(slot=8, name='seams', kind='tables', of='Seam'),
        FieldSpec(slot=9, name='bodies', kind='tables', of='Body'),
    )),
    'NamedSize': TableSpec('NamedSize', (
        FieldSpec(slot=0, name='name', kind='string', limit=1024, required=True),
        FieldSpec(slot=1, name='least', kind='scalar', code='q', default=0, minimum=0),
        FieldSpec(slot=2, name='most', kind='scalar', code='q', default=0),
        FieldSpec(slot=3, name='example', kind='scalar', code='q', default=0),
    )),
    'SizeTerm': TableSpec('SizeTerm', (
        FieldSpec(slot=0, name='coefficient', kind='scalar', code='q', default=1),
        FieldSpec(slot=1, name='factors', kind='scalars', code='I', limit=64),
    )),
    'SizeExpression': TableSpec('SizeExpression', (
        FieldSpec(slot=0, name='terms', kind='tables', of='SizeTerm'),
        FieldSpec(slot=1, name='divisor', kind='scalar', code='i', default=-1, minimum=-1),
    )),
    'SizeGuard': TableSpec('SizeGuard', (
        FieldSpec(slot=0, name='left', kind='scalar', code='I', default=0),
        FieldSpec(slot=1, name='relation', kind='scalar', code='B', of='SizeRelation', default=0, maximum=3),
        FieldSpec(slot=2, name='right', kind='scalar', code='I', default=0),
        FieldSpec(slot=3, name='line', kind='string', limit=4096),
        FieldSpec(slot=4, name='relied', kind='string', limit=4096),
        FieldSpec(slot=5, name='is_specialised', kind='scalar', code='B', default=0),
    )),
    'SymbolicValue': TableSpec('SymbolicValue', (
        FieldSpec(slot=0, name='name', kind='string', limit=1024),
        FieldSpec(slot=1, name='type', kind='table', of='ValueType', required=True, pooled=True),
        FieldSpec(slot=2, name='sizes', kind='scalars', code='i', minimum=-1, limit=32),
        FieldSpec(slot=3, name='is_numbered', kind='scalar', code='B', default=0),
    )),
    'SymbolicConstant': TableSpec('SymbolicConstant', (
        FieldSpec(slot=0, name='value', kind='scalar', code='I', default=0),
        FieldSpec(slot=1, name='segment', kind='scalar', code='I', default=0),
        FieldSpec(slot=2, name='elements', kind='scalars', code='I'),
    )),
    'SymbolicProgram': TableSpec('SymbolicProgram', (
        FieldSpec(slot=0, name='name', kind='string', limit=1024, required=True),
        FieldSpec(slot=1, name='role', kind='scalar', code='B', of='Role', default=0, maximum=3),
        FieldSpec(slot=2, name='math_fidelity', kind='scalar', code='B', of='MathFidelity', default=0, maximum=4),
        FieldSpec(slot=3, name='sizes', kind='tables', of='NamedSize', required=True),
        FieldSpec(slot=4, name='expressions', kind='tables', of='SizeExpression'),
        FieldSpec(slot=5, name='guards', kind='tables', of='SizeGuard'),
        FieldSpec(slot=6, name='inputs', kind='tables', of='InputSlot'),
        FieldSpec(slot=7, name='outputs', kind='tables', of='OutputSlot'),
        FieldSpec(slot=8, name='values', kind='tables', of='SymbolicValue'),
        FieldSpec(slot=9, name='operations', kind='tables', of='Operation'),
        FieldSpec(slot=10, name='constants', kind='tables', of='SymbolicConstant'),
        FieldSpec(slot=11, name='placement', kind='strings', limit=4096),
        FieldSpec(slot=12, name='needs_passes', kind='scalar', code='B', default=0),
    )),
    'SpaceShape': TableSpec('SpaceShape', (
        FieldSpec(slot=0, name='banks', kind='scalar', code='I', default=1, minimum=1),
        FieldSpec(slot=1, name='base', kind='scalar', code='Q', default=0),
        FieldSpec(slot=2, name='limit', kind='scalar', code='Q', default=0),
        FieldSpec(slot=3, name='alignment', kind='scalar', code='Q', default=1, minimum=1),
        FieldSpec(slot=4, name='granule', kind='scalar', code='Q', default=0),
    )),
    'Machine': TableSpec('Machine', (
        FieldSpec(slot=0, name='name', kind='string', limit=1024, required=True),
        FieldSpec(slot=1, name='core_rows', kind='scalar', code='I', default=1, minimum=1),
        FieldSpec(slot=2, name='core_columns', kind='scalar', code='I', default=1, minimum=1),
        FieldSpec(slot=3, name='host', kind='table', of='SpaceShape', required=True),
        FieldSpec(slot=4, name='l1', kind='table', of='SpaceShape'),
        FieldSpec(slot=5, name='dram', kind='table', of='SpaceShape'),
    )),
    'Segment': TableSpec('Segment', (
        FieldSpec(slot=0, name='offset', kind='scalar', code='Q', default=0),
        FieldSpec(slot=1, name='length', kind='scalar', code='Q', default=0),
        FieldSpec(slot=2, name='crc32', kind='scalar', code='I', default=0),
    )),
    'Binary': TableSpec('Binary', (
        FieldSpec(slot=0, name='version', kind='table', of='Version', required=True),
        FieldSpec(slot=1, name='producer', kind='string', limit=1024),
        FieldSpec(slot=2, name='opset', kind='scalar', code='I', default=0),
        FieldSpec(slot=3, name='machine', kind='table', of='Machine', required=True),
        FieldSpec(slot=4, name='programs', kind='tables', of='Program', required=True),
        FieldSpec(slot=5, name='segments', kind='tables', of='Segment'),
        FieldSpec(slot=6, name='requires', kind='strings', limit=1024),
        FieldSpec(slot=7, name='symbolic', kind='table', of='SymbolicProgram'),
    )),
}

SCHEMA = Schema(ROOT, TABLES, UNIONS, whole=True)
