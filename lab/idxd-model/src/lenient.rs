//! JSON as `accel-config` accepts it. json-c, its parser, allows a comma after the last element of an array or object,
//! and comments between the elements. `accel-config`'s own example files have such commas.

/// Returns `text` with trailing commas and comments blanked out, so that a JSON parser reads it. Every other byte keeps
/// its position, so errors have the right line and column. The parser itself refuses what json-c refuses (`[,]`,
/// `[1,,]`).
pub(crate) fn to_json(text: &str) -> String {
    let mut bytes = text.as_bytes().to_vec();
    // The last two bytes that are neither space nor comment, and the position of the last one.
    let (mut before, mut last, mut place) = (b' ', b' ', 0);
    let mut at = 0;
    while let Some(&byte) = bytes.get(at) {
        let end = at + 1;
        match (byte, bytes.get(end)) {
            (b' ' | b'\t' | b'\n' | b'\r', _) => at = end,
            (b'/', Some(b'*' | b'/')) => match end_of_comment(&bytes[at..]) {
                Some(length) => {
                    blank(&mut bytes[at..at + length]);
                    at += length;
                }
                None => break,
            },
            (b']' | b'}', _) => {
                if last == b',' && !matches!(before, b'[' | b'{' | b',' | b':') {
                    bytes[place] = b' ';
                }
                (before, last, place, at) = (last, byte, at, end);
            }
            (b'"', _) => {
                (before, last, place) = (last, byte, at);
                at += length_of_string(&bytes[at..]);
            }
            _ => (before, last, place, at) = (last, byte, at, end),
        }
    }
    String::from_utf8(bytes).expect("only whole characters were replaced")
}

/// Returns the length in bytes of the comment at the start of `text`, up to the end of its line or behind its `*/`;
/// `None` if the `*/` is missing.
fn end_of_comment(text: &[u8]) -> Option<usize> {
    if text[1] == b'/' {
        return Some(text.iter().position(|byte| *byte == b'\n').unwrap_or(text.len()));
    }
    text[2..].windows(2).position(|pair| pair == b"*/").map(|length| length + 4)
}

/// Returns the length in bytes of the string at the start of `text`, including both quotes.
fn length_of_string(text: &[u8]) -> usize {
    let mut escaped = false;
    let end = text[1..].iter().position(|byte| {
        let ends = *byte == b'"' && !escaped;
        escaped = *byte == b'\\' && !escaped;
        ends
    });
    end.map_or(text.len(), |end| end + 2)
}

fn blank(comment: &mut [u8]) {
    comment.iter_mut().filter(|byte| **byte != b'\n').for_each(|byte| *byte = b' ');
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn read(text: &str) -> Result<Value, serde_json::Error> {
        serde_json::from_str(&to_json(text))
    }

    #[test]
    fn what_json_c_accepts_is_read() {
        for (text, value) in [
            ("[1,]", json!([1])),
            (r#"{"a":1,}"#, json!({ "a": 1 })),
            ("[1\n , \n]", json!([1])),
            (r#"[{"a":[],},{"b":"x",},]"#, json!([{ "a": [] }, { "b": "x" }])),
            ("/* é */ [1, // ,]\n 2,/**/]", json!([1, 2])),
            ("[1] // the end", json!([1])),
        ] {
            assert_eq!(read(text).unwrap(), value, "{text}");
        }
    }

    #[test]
    fn what_json_c_refuses_is_refused() {
        for text in ["[,]", "{,}", "[1,,]", "[1,,2]", r#"{"a":,}"#, "[1,] /* no end", "[1", r#"["a,]"#, "/", ""] {
            assert!(read(text).is_err(), "{text}");
        }
    }

    #[test]
    fn strings_are_left_as_they_are() {
        for text in [r#"[",]"]"#, r#"["/* x */ // y"]"#, r#"["\",]\\"]"#, r#"{",}":"\\"}"#] {
            assert_eq!(to_json(text), text);
        }
    }

    #[test]
    fn errors_name_the_line_and_column_of_the_file() {
        let error = read("[ /* two\nlines */ 1,\n 2,\n x ]").unwrap_err();
        assert_eq!((error.line(), error.column()), (4, 2));
    }
}
