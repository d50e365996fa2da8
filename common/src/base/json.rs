//! JSON, and values of serde, as BSON, without rounding an integer.
//!
//! Used wherever a value comes from a text or from an application: parameters, messages, results, checkpoints. BSON has integers of 64 bits
//! with a sign. A larger one would become a floating-point number, which is another number, and two unique keys could become one. So it is
//! refused, with the path of its field.

use std::fmt::Write as _;

use bson::Bson;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::of_bson;

/// A value that BSON cannot store, or a text that is not JSON.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum JsonError {
    /// An integer has more than 64 bits.
    #[error(
        "{}{digits:.40} is outside the integers that MongoDB stores exactly (from -2^63 to 2^63-1): write it as a text, or as {{\"$numberDecimal\": \"{digits:.40}\"}}",
        if path.is_empty() { String::new() } else { format!("`{path}`: ") }
    )]
    TooLarge {
        /// Where it is: names of fields and indexes, with dots between them. Empty for the value itself.
        path: String,
        /// The integer.
        digits: String,
    },
    /// The text is not JSON, or not of the expected type.
    #[error(transparent)]
    Invalid(#[from] serde_json::Error),
    /// The value has no form in BSON.
    #[error("{0}")]
    Unstorable(String),
}

/// Reads a JSON text.
///
/// # Errors
/// When it is not JSON, is not of this type, or has an integer that BSON cannot store.
pub fn parse<'a, T: Deserialize<'a>>(text: &'a str) -> Result<T, JsonError> {
    // serde_json reads an integer of more than 64 bits as a floating-point number, so only the text shows it.
    match first_too_large(text) {
        Some(problem) => Err(problem),
        None => Ok(serde_json::from_str(text)?),
    }
}

/// The BSON of a text in extended JSON.
///
/// # Errors
/// When it is not JSON, or BSON cannot store it.
pub fn bson_of_text(text: &str) -> Result<Bson, JsonError> {
    parse(text).and_then(to_bson)
}

/// The BSON of a value in extended JSON.
///
/// # Errors
/// When BSON cannot store it.
pub fn to_bson(value: Value) -> Result<Bson, JsonError> {
    if let Some(problem) = too_large_in(&value, &mut String::new()) {
        return Err(problem);
    }
    Bson::try_from(value).map_err(|error| JsonError::Unstorable(error.to_string()))
}

/// The same, with an error for the person who has written the text.
pub(crate) fn extended(value: Value) -> Result<Bson, String> {
    to_bson(value).map_err(|error| match error {
        JsonError::Unstorable(problem) => format!("invalid extended JSON: {problem}"),
        problem @ (JsonError::TooLarge { .. } | JsonError::Invalid(_)) => problem.to_string(),
    })
}

/// Relaxed extended JSON, except for integers that would be read back with fewer bits.
pub(crate) fn relaxed(value: Bson) -> Value {
    if let Bson::Document(document) = value {
        Value::Object(document.into_iter().map(|(key, value)| (key, relaxed(value))).collect())
    } else if let Bson::Array(list) = value {
        Value::Array(list.into_iter().map(relaxed).collect())
    } else if let Some(number) = value.as_i64().filter(|number| i32::try_from(*number).is_ok()) {
        serde_json::json!({ "$numberLong": number.to_string() })
    } else {
        value.into_relaxed_extjson()
    }
}

/// The BSON of a value of any type.
///
/// # Errors
/// When BSON cannot store it. The error names the field of an integer that is too large.
pub fn bson_of<T: Serialize + ?Sized>(value: &T) -> Result<Bson, JsonError> {
    bson::serialize_to_bson(value).map_err(|error| {
        // bson's own error does not name the field.
        let too_large = serde_json::to_value(value).ok().and_then(|value| too_large_in(&value, &mut String::new()));
        too_large.unwrap_or_else(|| JsonError::Unstorable(of_bson(&error)))
    })
}

/// Appends a step to a path, runs `within`, and takes the step back.
fn at<T>(path: &mut String, step: &dyn std::fmt::Display, within: impl FnOnce(&mut String) -> T) -> T {
    let length = path.len();
    _ = write!(path, "{}{step}", if length == 0 { "" } else { "." });
    let found = within(path);
    path.truncate(length);
    found
}

fn too_large_in(value: &Value, path: &mut String) -> Option<JsonError> {
    match value {
        Value::Number(number) => {
            let too_large = number.as_u64().filter(|number| i64::try_from(*number).is_err())?;
            Some(JsonError::TooLarge { path: path.clone(), digits: too_large.to_string() })
        }
        Value::Array(list) => list.iter().enumerate().find_map(|(index, value)| at(path, &index, |path| too_large_in(value, path))),
        Value::Object(fields) => fields.iter().find_map(|(name, value)| at(path, name, |path| too_large_in(value, path))),
        Value::Null | Value::Bool(_) | Value::String(_) => None,
    }
}

/// A place in a JSON text, in one object or array.
enum Place<'a> {
    /// After this name.
    Field(&'a str),
    Index(usize),
}

/// The first integer of a JSON text that has more than 64 bits. The text may be invalid.
fn first_too_large(text: &str) -> Option<JsonError> {
    let (bytes, mut places) = (text.as_bytes(), Vec::new());
    let mut next = 0;
    while let Some(byte) = bytes.get(next) {
        let start = next;
        next += 1;
        match byte {
            b'{' => places.push(Place::Field("")),
            b'[' => places.push(Place::Index(0)),
            b'}' | b']' => _ = places.pop(),
            b',' => {
                if let Some(Place::Index(index)) = places.last_mut() {
                    *index += 1;
                }
            }
            b'"' => {
                while bytes.get(next).is_some_and(|byte| *byte != b'"') {
                    next += if bytes[next] == b'\\' { 2 } else { 1 };
                }
                // A text that is a value is taken for a name as well, until the name of the next field.
                if let (Some(Place::Field(name)), Some(quoted)) = (places.last_mut(), text.get(start + 1..next)) {
                    *name = quoted;
                }
                next += 1;
            }
            b'-' | b'0'..=b'9' => {
                let rest = bytes[start..].iter().take_while(|byte| matches!(byte, b'+' | b'-' | b'.' | b'e' | b'E' | b'0'..=b'9'));
                next = start + rest.count();
                let number = &text[start..next];
                let is_integer = number.trim_start_matches('-').bytes().all(|byte| byte.is_ascii_digit());
                // A sign alone is no JSON, which serde_json reports.
                if is_integer && number != "-" && number.parse::<i64>().is_err() {
                    let step = |place: &Place<'_>| match place {
                        Place::Field(name) => (*name).to_owned(),
                        Place::Index(index) => index.to_string(),
                    };
                    let path = places.iter().map(step).collect::<Vec<_>>().join(".");
                    return Some(JsonError::TooLarge { path, digits: number.to_owned() });
                }
            }
            _ => {}
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use bson::doc;

    use super::*;

    #[test]
    fn an_integer_of_more_than_64_bits_is_refused_with_its_path_and_others_are_exact() {
        for (text, path) in [
            ("18446744073709551615", ""),
            ("9223372036854775808", ""),
            (r#"{"a": "x", "b": {"c": [1, "2", {"d": 18446744073709551616}]}}"#, "b.c.2.d"),
            (r#"{"a\"": [-9223372036854775809]}"#, "a\\\".0"),
            (r#"[[], {}, [{"a": 1}, 100000000000000000000000000000]]"#, "2.1"),
        ] {
            let problem = bson_of_text(text).expect_err(text).to_string();
            assert!(problem.contains("$numberDecimal") && (path.is_empty() || problem.starts_with(&format!("`{path}`: "))), "{problem}");
        }
        let text = r#"{"a": 9223372036854775807, "b": -9223372036854775808, "c": 1e300, "d": "18446744073709551615", "e": 18446744073709551615.5,
            "f": {"$numberDecimal": "18446744073709551615"}}"#;
        let read = bson_of_text(text).expect("a document");
        let decimal: bson::Decimal128 = "18446744073709551615".parse().expect("a decimal");
        let texts =
            doc! { "a": i64::MAX, "b": i64::MIN, "c": 1e300, "d": "18446744073709551615", "e": 18_446_744_073_709_551_615.5, "f": decimal };
        assert_eq!(read, texts.into());
    }

    #[test]
    fn a_value_of_an_application_is_refused_in_the_same_way() {
        #[derive(Serialize)]
        struct Order {
            lines: Vec<(u64, &'static str)>,
        }
        let order = |id| Order { lines: vec![(1, "a"), (id, "b")] };
        assert!(bson_of(&order(i64::MAX.unsigned_abs())).is_ok());
        let problem = |error: Result<Bson, JsonError>| error.expect_err("it is too large").to_string();
        assert!(problem(bson_of(&order(u64::MAX))).starts_with("`lines.1.0`: 18446744073709551615 "));
        assert!(problem(to_bson(serde_json::json!({ "a": [u64::MAX] }))).starts_with("`a.0`: 18446744073709551615 "));
        assert!(problem(bson_of(&u128::MAX)).contains("u128"));
    }

    #[test]
    fn a_text_that_is_no_json_is_reported_as_such() {
        for text in ["", "-", "{", "}", "]]", "\"", "\"\\", "{\"a", "[1,,2]", "1-2", "--1", "é\"é", "9\u{301}"] {
            assert!(matches!(bson_of_text(text), Err(JsonError::Invalid(_) | JsonError::TooLarge { .. })), "{text}");
        }
    }
}
