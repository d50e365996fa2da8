//! Enums of which each variant has a word, for documents, programs and people.

/// Makes such an enum, the list of its variants, and the method that returns the word of a variant.
macro_rules! words {
    (
        $(#[$of_enum:meta])* $visibility:vis enum $name:ident { $($(#[$of_variant:meta])* $variant:ident = $text:literal,)+ }
        $(#[$of_word:meta])* fn $word:ident;
    ) => {
        $(#[$of_enum])*
        $visibility enum $name { $($(#[$of_variant])* $variant,)+ }

        impl $name {
            /// All of them, in this order.
            $visibility const ALL: [Self; [$($text),+].len()] = [$(Self::$variant),+];

            $(#[$of_word])*
            $visibility fn $word(self) -> &'static str {
                match self { $(Self::$variant => $text,)+ }
            }
        }
    };
}

pub(crate) use words;
