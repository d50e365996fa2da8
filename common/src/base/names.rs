//! Names of classes, groups, tags and keys.

/// Maximum length of a class, group, tag or urn, in bytes.
pub const LONGEST_NAME: usize = 256;

/// Checks a `traceparent` of the W3C Trace Context: version, trace, parent and flags in lower-case hexadecimal digits. A later version may
/// have more parts.
///
/// # Errors
/// What is wrong, as the end of a sentence.
pub(crate) fn check_traceparent(text: &str) -> Result<(), String> {
    let is_hex = |part: &&str| part.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
    let parts: Vec<&str> = text.split('-').take_while(is_hex).collect();
    let lengths: Vec<usize> = parts.iter().take(4).map(|part| part.len()).collect();
    let is_known_version = parts.first().is_some_and(|version| *version == "00");
    if lengths == [2, 32, 16, 2] && text.len() <= LONGEST_NAME && !(is_known_version && text.len() > 55) {
        Ok(())
    } else {
        Err(format!("is not a W3C `traceparent` such as 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01: {text:.80?}"))
    }
}

/// Checks the name of a class or a group: a blank or a line break around it is never meant, and no worker has the other class.
///
/// # Errors
/// What is wrong with the name, as the end of a sentence.
pub fn check_trimmed_name(name: &str) -> Result<(), String> {
    check_name(name)?;
    if name.trim() == name { Ok(()) } else { Err(format!("begins or ends with a blank or a line break: {name:?}; remove it")) }
}

/// Checks a name that is stored and indexed.
///
/// # Errors
/// What is wrong with the name, as the end of a sentence.
pub(crate) fn check_name(name: &str) -> Result<(), String> {
    if name.is_empty() {
        Err("is empty".into())
    } else if name.len() > LONGEST_NAME {
        Err(format!("has {} bytes, and {LONGEST_NAME} is the limit", name.len()))
    } else if name.contains('\0') {
        Err(format!("contains a NUL character: {name:?}"))
    } else {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_traceparent_has_four_parts_of_hexadecimal_digits() {
        let good = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
        for text in [good.to_owned(), format!("01{}-more", &good[2..])] {
            assert_eq!(check_traceparent(&text), Ok(()), "{text}");
        }
        for text in
            [String::new(), good.to_uppercase(), good[..54].to_owned(), format!("{good}-more"), format!("{good}0"), good.replace('-', "_")]
        {
            assert!(check_traceparent(&text).is_err(), "{text}");
        }
    }
}
