//! Decodes `ENQCMD r64, m512` (F2 0F 38 F8 /r) and `MOVDIR64B r64, m512` (66 0F 38 F8 /r), with every form of address.

/// The instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Instruction {
    Enqcmd,
    Movdir64b,
}

/// An instruction, evaluated with the state of the registers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Decoded {
    pub(super) instruction: Instruction,
    /// From the register operand.
    pub(super) destination: u64,
    /// From the memory operand.
    pub(super) source: u64,
    /// Bytes.
    pub(super) length: usize,
}

/// Maximum length of an instruction, in bytes.
pub(super) const MAX_INSTRUCTION_BYTES: usize = 15;

/// Why nothing was decoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Undecoded {
    /// The bytes are the beginning of one of the two instructions.
    CutOff,
    /// Another instruction.
    Foreign,
}

/// Decodes an instruction. `registers` are in the order of their numbers (rax, rcx, rdx, rbx, rsp, rbp, rsi, rdi, r8
/// …).
pub(super) fn decode(code: &[u8], address: u64, registers: &[u64; 16]) -> Result<Decoded, Undecoded> {
    let mut at = 0;
    let byte = |at: usize| code.get(at).copied().ok_or(Undecoded::CutOff);
    let mut instruction = None;
    let mut short_addresses = false;
    loop {
        match byte(at)? {
            0xf2 => instruction = Some(Instruction::Enqcmd),
            0x66 if instruction != Some(Instruction::Enqcmd) => instruction = Some(Instruction::Movdir64b),
            0x67 => short_addresses = true,
            _ => break,
        }
        at += 1;
    }
    let instruction = instruction.ok_or(Undecoded::Foreign)?;
    let rex = match byte(at)? {
        rex @ 0x40..=0x4f => {
            at += 1;
            rex
        }
        _ => 0,
    };
    for opcode in [0x0f, 0x38, 0xf8] {
        if byte(at)? != opcode {
            return Err(Undecoded::Foreign);
        }
        at += 1;
    }
    let modrm = byte(at)?;
    at += 1;
    let (mode, register, memory) = (modrm >> 6, modrm >> 3 & 7, modrm & 7);
    if mode == 3 {
        return Err(Undecoded::Foreign);
    }
    let destination = registers[usize::from(register | (rex & 4) << 1)];
    let mut base = None;
    let mut index = 0;
    let mut relative = false;
    let mut displacement = mode;
    if memory == 4 {
        let sib = byte(at)?;
        at += 1;
        let index_register = (sib >> 3 & 7) | (rex & 2) << 2;
        if index_register != 4 {
            index = registers[usize::from(index_register)] << (sib >> 6);
        }
        if sib & 7 == 5 && mode == 0 {
            displacement = 2;
        } else {
            base = Some(sib & 7);
        }
    } else if memory == 5 && mode == 0 {
        displacement = 2;
        relative = true;
    } else {
        base = Some(memory);
    }
    let offset = match displacement {
        1 => i64::from(byte(at)?.cast_signed()),
        2 => i64::from(i32::from_le_bytes([byte(at)?, byte(at + 1)?, byte(at + 2)?, byte(at + 3)?])),
        _ => 0,
    };
    at += match displacement {
        1 => 1,
        2 => 4,
        _ => 0,
    };
    let base = base.map_or(0, |base| registers[usize::from(base | (rex & 1) << 3)]);
    let base = if relative { address.wrapping_add(at as u64) } else { base };
    let source = base.wrapping_add(index).wrapping_add(offset.cast_unsigned());
    let shorten = |value: u64| if short_addresses { value & 0xffff_ffff } else { value };
    Ok(Decoded { instruction, destination: shorten(destination), source: shorten(source), length: at })
}

#[cfg(test)]
mod tests {
    use super::*;

    const ADDRESS: u64 = 0x5000;

    fn registers() -> [u64; 16] {
        std::array::from_fn(|index| 0x1_0000 * (index as u64 + 1))
    }

    fn source(code: &[u8]) -> u64 {
        decode(code, ADDRESS, &registers()).unwrap().source
    }

    #[test]
    fn operands_of_both() {
        // enqcmd rax, [rcx]; movdir64b rdi, [rsi]
        let enqcmd = decode(&[0xf2, 0x0f, 0x38, 0xf8, 0x01], ADDRESS, &registers()).unwrap();
        assert_eq!(enqcmd.instruction, Instruction::Enqcmd);
        assert_eq!((enqcmd.destination, enqcmd.source, enqcmd.length), (0x1_0000, 0x2_0000, 5));
        let movdir = decode(&[0x66, 0x0f, 0x38, 0xf8, 0x3e], ADDRESS, &registers()).unwrap();
        assert_eq!(movdir.instruction, Instruction::Movdir64b);
        assert_eq!((movdir.destination, movdir.source), (0x8_0000, 0x7_0000));
    }

    #[test]
    fn every_form_of_address() {
        // [rcx+0x10], [rcx-0x40], [rcx+0x1234]
        assert_eq!(source(&[0xf2, 0x0f, 0x38, 0xf8, 0x41, 0x10]), 0x2_0010);
        assert_eq!(source(&[0xf2, 0x0f, 0x38, 0xf8, 0x41, 0xc0]), 0x1_ffc0);
        assert_eq!(source(&[0xf2, 0x0f, 0x38, 0xf8, 0x81, 0x34, 0x12, 0, 0]), 0x2_1234);
        // [rsp+8] needs a SIB byte without index
        assert_eq!(source(&[0xf2, 0x0f, 0x38, 0xf8, 0x44, 0x24, 0x08]), 0x5_0008);
        // [rbx+rdx*8+4]
        assert_eq!(source(&[0xf2, 0x0f, 0x38, 0xf8, 0x44, 0xd3, 0x04]), 0x4_0000 + 8 * 0x3_0000 + 4);
        // [rip+0x100]: from the end of the instruction
        assert_eq!(source(&[0xf2, 0x0f, 0x38, 0xf8, 0x05, 0, 1, 0, 0]), ADDRESS + 9 + 0x100);
        // [0x2000]: SIB without base and index
        assert_eq!(source(&[0xf2, 0x0f, 0x38, 0xf8, 0x04, 0x25, 0, 0x20, 0, 0]), 0x2000);
    }

    #[test]
    fn upper_registers_come_with_rex() {
        // enqcmd r9, [r12]: REX.R and REX.B; r12 needs a SIB byte
        let decoded = decode(&[0xf2, 0x45, 0x0f, 0x38, 0xf8, 0x0c, 0x24], ADDRESS, &registers()).unwrap();
        assert_eq!((decoded.destination, decoded.source, decoded.length), (0xa_0000, 0xd_0000, 7));
        // movdir64b rax, [rbx+r13*1]: REX.X
        let decoded = decode(&[0x66, 0x42, 0x0f, 0x38, 0xf8, 0x04, 0x2b], ADDRESS, &registers()).unwrap();
        assert_eq!((decoded.destination, decoded.source), (0x1_0000, 0x4_0000 + 0xe_0000));
    }

    #[test]
    fn other_instructions_are_not_decoded() {
        let foreign = |code: &[u8]| decode(code, ADDRESS, &registers()) == Err(Undecoded::Foreign);
        assert!(foreign(&[0x0f, 0x0b]), "ud2");
        assert!(foreign(&[0x66, 0x0f, 0x0b]), "ud2 with a prefix");
        assert!(foreign(&[0x0f, 0x38, 0xf8, 0x01]), "no prefix");
        assert!(foreign(&[0xf3, 0x0f, 0x38, 0xf8, 0x01]), "ENQCMDS is the kernel's");
        assert!(foreign(&[0xf2, 0x0f, 0x38, 0xf8, 0xc1]), "register operand");
    }

    #[test]
    fn only_a_beginning_of_one_of_the_two_is_cut_off() {
        let whole = [0xf2, 0x45, 0x0f, 0x38, 0xf8, 0x8c, 0x24, 0x78, 0x56, 0x34, 0x12];
        assert!(decode(&whole, ADDRESS, &registers()).is_ok());
        for length in 0..whole.len() {
            assert_eq!(decode(&whole[..length], ADDRESS, &registers()), Err(Undecoded::CutOff), "{length}");
        }
    }
}
