//! Makes text from a peer safe to print.
//!
//! A peer's refusal or error is read by a person in a terminal or a log. It is truncated to [`MAX_TEXT`] bytes, and
//! characters that a terminal interprets instead of showing are replaced: control characters (escape sequences, line
//! breaks that would forge log lines) and Unicode's format characters (overrides of the direction, which make a text
//! read as another one; characters without width, which make two different texts look alike).

use crate::limits::MAX_TEXT;

/// Returns `text` on one line, every control and format character replaced by a space.
pub fn printable(text: &str) -> String {
    text.chars().map(shown).collect()
}

fn shown(character: char) -> char {
    if character.is_control() || is_format(character) { ' ' } else { character }
}

/// Returns whether Unicode counts a character as formatting rather than text: general categories Cf, Zl and Zp of
/// Unicode 16, the blocks of tags as a whole.
fn is_format(character: char) -> bool {
    matches!(character,
        '\u{ad}' | '\u{600}'..='\u{605}' | '\u{61c}' | '\u{6dd}' | '\u{70f}' | '\u{890}'..='\u{891}' | '\u{8e2}'
        | '\u{180e}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}'
        | '\u{fff9}'..='\u{fffb}' | '\u{110bd}' | '\u{110cd}' | '\u{13430}'..='\u{1343f}' | '\u{1bca0}'..='\u{1bca3}'
        | '\u{1d173}'..='\u{1d17a}' | '\u{e0000}'..='\u{e0fff}')
}

/// Returns `text` truncated to [`MAX_TEXT`] bytes at a character boundary, every control and format character replaced
/// by a space.
pub fn cleaned(text: &str) -> String {
    let mut clean = String::with_capacity(text.len().min(MAX_TEXT));
    for character in text.chars() {
        let shown = shown(character);
        if clean.len() + shown.len_utf8() > MAX_TEXT {
            break;
        }
        clean.push(shown);
    }
    clean
}

/// As [`cleaned`], for bytes that may not even be UTF-8.
pub fn cleaned_bytes(bytes: &[u8]) -> String {
    cleaned(&String::from_utf8_lossy(&bytes[..bytes.len().min(4 * MAX_TEXT)]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn escape_sequences_and_line_breaks_do_not_survive() {
        assert_eq!(cleaned("a\x1b[31mb\r\nc"), "a [31mb  c");
    }

    #[test]
    fn what_turns_the_reading_direction_or_has_no_width_does_not_survive() {
        assert_eq!(cleaned("allow \u{202e}rednes\u{202c}\u{2066}x\u{2069}"), "allow  rednes  x ");
        for hidden in ['\u{200b}', '\u{200f}', '\u{2028}', '\u{feff}', '\u{ad}', '\u{61c}', '\u{e0041}'] {
            assert_eq!(printable(&format!("a{hidden}b")), "a b", "U+{:X}", u32::from(hidden));
        }
        assert_eq!(cleaned("Größe 大小 גודל"), "Größe 大小 גודל");
    }

    #[test]
    fn long_text_is_cut_at_a_character_boundary() {
        let long = "é".repeat(MAX_TEXT);
        let cut = cleaned(&long);
        assert!(cut.len() <= MAX_TEXT && cut.chars().all(|character| character == 'é'));
    }

    #[test]
    fn bytes_that_are_not_utf8_are_shown_with_replacements() {
        assert_eq!(cleaned_bytes(b"a\xffb"), "a\u{fffd}b");
    }
}
