//! The arguments of a program, as the workables file writes them: text with placeholders for a job's parameters.
//!
//! One argument stays one argument, with every value of a placeholder.

use std::{ffi::OsString, os::unix::ffi::OsStringExt};

use bson::Bson;
use recruiter_common::failure::{self, Failure};

/// An argument with placeholders: `{name}`, `{nested.name}`; `{{` and `}}` are braces.
#[derive(Debug, PartialEq)]
pub(crate) struct Template(Vec<Piece>);

#[derive(Debug, PartialEq)]
enum Piece {
    Text(String),
    Parameter(String),
}

impl Template {
    /// The error is the problem with the text, as a sentence.
    pub(crate) fn parse(text: &str) -> Result<Self, &'static str> {
        let (mut pieces, mut literal, mut rest) = (Vec::new(), String::new(), text);
        while let Some(at) = rest.find(['{', '}', '\0']) {
            literal.push_str(&rest[..at]);
            let from = &rest[at..];
            rest = if let Some(rest) = from.strip_prefix("{{") {
                literal.push('{');
                rest
            } else if let Some(rest) = from.strip_prefix("}}") {
                literal.push('}');
                rest
            } else if let Some(inside) = from.strip_prefix('{') {
                let (name, rest) = inside.split_once('}').ok_or("a `{` is never closed; write `{{` for a literal brace")?;
                let is_word = |word: &str| !word.is_empty() && word.chars().all(|c| c.is_alphanumeric() || c == '_' || c == '-');
                if !name.split('.').all(is_word) {
                    return Err("a placeholder is written `{name}` or `{nested.name}`; write `{{` and `}}` for literal braces");
                }
                pieces.push(Piece::Text(std::mem::take(&mut literal)));
                pieces.push(Piece::Parameter(name.to_owned()));
                rest
            } else if from.starts_with('}') {
                return Err("a `}` was never opened; write `}}` for a literal brace");
            } else {
                return Err("an argument cannot contain a NUL");
            };
        }
        literal.push_str(rest);
        pieces.push(Piece::Text(literal));
        Ok(Self(pieces))
    }

    /// The text, if there is no placeholder in it.
    pub(crate) fn literal(&self) -> Option<&str> {
        match self.0.as_slice() {
            [Piece::Text(text)] => Some(text),
            _ => None,
        }
    }

    pub(crate) fn render(&self, parameters: &Bson) -> Result<OsString, Failure> {
        let mut argument = Vec::new();
        for piece in &self.0 {
            match piece {
                Piece::Text(text) => argument.extend_from_slice(text.as_bytes()),
                Piece::Parameter(path) => {
                    let value = text_of(lookup(parameters, path)).ok_or_else(|| {
                        Failure::new(failure::PARAMETERS, format!("the command needs parameter `{path}`, which is missing"))
                    })?;
                    if value.contains(&0) {
                        let message = format!("parameter `{path}` contains a NUL, which an argument of a program cannot contain");
                        return Err(Failure::new(failure::PARAMETERS, message));
                    }
                    argument.extend(value);
                }
            }
        }
        Ok(OsString::from_vec(argument))
    }
}

fn lookup<'a>(parameters: &'a Bson, path: &str) -> &'a Bson {
    path.split('.').fold(parameters, |value, name| value.as_document().and_then(|fields| fields.get(name)).unwrap_or(&Bson::Null))
}

/// The text of a value in an argument; `None` for null.
fn text_of(value: &Bson) -> Option<Vec<u8>> {
    Some(match value {
        Bson::Null | Bson::Undefined => return None,
        Bson::String(text) | Bson::Symbol(text) => text.clone().into_bytes(),
        Bson::Binary(binary) => binary.bytes.clone(),
        Bson::Int32(number) => number.to_string().into_bytes(),
        Bson::Int64(number) => number.to_string().into_bytes(),
        Bson::Double(number) => number.to_string().into_bytes(),
        Bson::Decimal128(number) => number.to_string().into_bytes(),
        Bson::Boolean(truth) => truth.to_string().into_bytes(),
        Bson::ObjectId(id) => id.to_hex().into_bytes(),
        Bson::DateTime(date) => date.try_to_rfc3339_string().map_or_else(|_| extended_json(value), String::into_bytes),
        Bson::Document(_)
        | Bson::Array(_)
        | Bson::RegularExpression(_)
        | Bson::JavaScriptCode(_)
        | Bson::JavaScriptCodeWithScope(_)
        | Bson::Timestamp(_)
        | Bson::MaxKey
        | Bson::MinKey
        | Bson::DbPointer(_) => extended_json(value),
    })
}

fn extended_json(value: &Bson) -> Vec<u8> {
    value.clone().into_relaxed_extjson().to_string().into_bytes()
}

#[cfg(test)]
mod tests {
    use std::{ffi::OsStr, os::unix::ffi::OsStrExt};

    use bson::{Binary, doc, oid::ObjectId, spec::BinarySubtype};

    use super::*;

    #[test]
    fn arguments_are_rendered() {
        let id = ObjectId::new();
        let parameters = Bson::Document(doc! {
            "text": "a b", "int": 7, "long": i64::MAX, "whole": 3.0, "half": 0.5, "truth": true, "null": null, "id": id,
            "date": bson::DateTime::from_millis(1_500), "name": Binary { subtype: BinarySubtype::Generic, bytes: b"caf\xe9".to_vec() },
            "nested": { "deeper": { "x": "y" } }, "list": [1, "two"], "hostile": "$(rm -rf /); `id` \"'\n--x {text} %s",
            "nul": "a\0b", "when": bson::Timestamp { time: 1, increment: 2 },
        });
        let check = |template: &str, expected: &[u8]| {
            let rendered = Template::parse(template).unwrap().render(&parameters);
            assert_eq!(rendered.as_deref().map(OsStr::as_bytes), Ok(expected), "{template}");
        };
        check("", b"");
        check("--name={text}!", b"--name=a b!");
        check("{int}/{long}/{whole}/{half}/{truth}", b"7/9223372036854775807/3/0.5/true");
        check("{id}", id.to_hex().as_bytes());
        check("{date}", b"1970-01-01T00:00:01.5Z");
        check("/data/{name}", b"/data/caf\xe9");
        check("{nested.deeper.x}", b"y");
        check("{nested}", br#"{"deeper":{"x":"y"}}"#);
        check("{list}", br#"[1,"two"]"#);
        check("{when}", br#"{"$timestamp":{"t":1,"i":2}}"#);
        check("{hostile}", b"$(rm -rf /); `id` \"'\n--x {text} %s");
        check("{{text}} {{{int}}} }}{{", b"{text} {7} }{");
        let refuse = |template: &str, parameter: &str| {
            let refused = Template::parse(template).unwrap().render(&parameters).unwrap_err();
            assert!(refused.class == failure::PARAMETERS && refused.message.contains(&format!("parameter `{parameter}`")), "{refused:?}");
        };
        refuse("{absent}", "absent");
        refuse("{null}", "null");
        refuse("{text.deeper}", "text.deeper");
        refuse("{nested.absent.x}", "nested.absent.x");
        refuse("x{nul}", "nul");
        assert!(Template::parse("{x}").unwrap().render(&Bson::Null).is_err());
    }

    #[test]
    fn only_a_text_without_placeholders_is_literal() {
        assert_eq!(Template::parse("a{{b}}").unwrap().literal(), Some("a{b}"));
        assert_eq!(Template::parse("").unwrap().literal(), Some(""));
        assert_eq!(Template::parse("{a}").unwrap().literal(), None);
    }
}
