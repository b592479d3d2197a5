//! Text that came from a peer, made fit to be shown.
//!
//! A peer's refusal or error is read by a person in a terminal or a log: it is cut at [`MAX_TEXT`] bytes, and control
//! characters (escape sequences, line breaks that would forge log lines) are replaced.

use crate::limits::MAX_TEXT;

/// `text` cut to [`MAX_TEXT`] bytes at a character boundary, every control character replaced by a space.
pub fn cleaned(text: &str) -> String {
    let mut clean = String::with_capacity(text.len().min(MAX_TEXT));
    for character in text.chars() {
        let shown = if character.is_control() { ' ' } else { character };
        if clean.len() + shown.len_utf8() > MAX_TEXT {
            break;
        }
        clean.push(shown);
    }
    clean
}

/// [`cleaned`] for bytes that may not even be UTF-8.
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
