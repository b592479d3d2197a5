// What the fuzz target and the plain corpus test do with arbitrary bytes as the records of the gateway's stream channel.
// The first byte is the record's kind, as its packet's `subject` would be.
//
// The records are the gateway's own business and not public, so their file is included as it stands; it finds the parsers
// of QEMU's stream where the gateway does.

use crate::layout;

/// Whether `data` is a record that can be understood.
pub(crate) fn record(data: &[u8]) -> bool {
    let Some((&kind, content)) = data.split_first() else { return false };
    match u16::from(kind) {
        layout::record::START => match layout::Start::decode(content) {
            Ok(start) => {
                let again = layout::Start::decode(&start.encode()).expect("what was read can be written and read");
                assert_eq!((again.configuration, again.ram), (start.configuration, start.ram));
                assert_eq!((again.prologue.len(), again.uuid), (start.prologue.len(), start.uuid));
                true
            }
            Err(_) => false,
        },
        layout::record::COMMAND => crate::stream::Command::parse(content).is_ok(),
        layout::record::DEVICE_SECTION => layout::decode_device_section(content).is_ok(),
        layout::record::RAM_END => layout::decode_ram_end(content).is_ok(),
        layout::record::OPAQUE => true,
        layout::record::END => content.is_empty(),
        _ => false,
    }
}
